"""Time of the syncer's arithmetic for one round, as multiples of what the memory of the same machine allows.

python -m tests.bench.syncer_round --numel 64e6 --contributors 4 --threads 2 --json
python -m tests.bench.syncer_round --numel 64e6 256e6 --contributors 4 8 --out tests/bench/results/syncer_round.json

1. The calls are those of the merge worker: `AnchorStore.measure`, `merge` and `next_state`, on payloads that learners
   would send. Encoding and decoding are those of a learner on a CPU. Each is repeated; the median counts.
2. A memcpy of the fragment's float32 values on one thread is the unit: 8 bytes per parameter, 4 read and 4 written. The
   floor of a merge is (2 M + 2) bytes per parameter: M payloads are read twice, once to be compared and once to be
   added up, and the outer gradient is written. The floor of an outer step with its publication is 27: the state and the
   gradient are read (14), the new state and the update are written (13).
3. Peak memory is measured by the kernel, in a process of its own per row, as a multiple of a float32 fragment: what a
   round needs beyond state, payloads, outer gradient and the next state.
4. `plan_over_measured` is the time that `diloco plan` forecasts for the merge and the outer step, from the cores and
   from the memory rate that `diloco doctor` measures, over the time that they took.
5. Control: torch, without the compiled loops, must miss the bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_diloco.cli.sites.measure import memory_bytes_per_s
from lightning_diloco.config import RunConfig
from lightning_diloco.core import native
from lightning_diloco.core.digest import digest
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import Decoder, encode
from lightning_diloco.planner.bandwidth import Machines, merge_s_per_value
from lightning_diloco.syncer.anchors import AnchorStore
from tests.bench import report
from tests.resident import forget_peak, resident_at_most, resident_now

BLOCK_SIZE = 256
BOUNDS = {"encode_over_memcpy": 2.5, "decode_over_memcpy": 1.2, "merge_over_floor": 4.0, "commit_over_floor": 2.0}
PEAK_BOUND = 0.25  # float32 fragments
FORECAST = 0.15


def measure(numel: int, contributors: int, threads: int, *, repeats: int, compiled: bool) -> dict[str, Any]:
    """Measure one row in this process."""
    torch.set_num_threads(threads)
    if compiled and (problem := native.load()) is not None:
        raise SystemExit(f"numba cannot be used ({problem}): pip install 'lightning-diloco[syncer]'")
    native.SMALLEST_NUMEL = 1 if compiled else sys.maxsize
    width = 1024
    plan = FragmentPlan.balanced({"w": (numel // width, width)}, num_fragments=1, max_slice_numel=numel)
    store = AnchorStore(plan, RunConfig(num_fragments=1, sync_every=8, block_size=BLOCK_SIZE))
    numel = store.layouts[0].padded_numel
    memcpy_s, times, payloads = _of_learner(store, contributors, repeats)
    native._free.clear()
    forget_peak()
    before = resident_now(os.getpid())
    merges, commits, shares = [], [], [1 / contributors] * contributors
    for _ in range(repeats):
        began_s = time.perf_counter()
        measured = store.measure(0, payloads)
        gradient, _report = store.merge(0, payloads, shares, measured=measured)
        merged_s = time.perf_counter()
        state = store.next_state(0, gradient, work=1.0)
        committed_s = time.perf_counter()
        merges.append(merged_s - began_s)
        commits.append(committed_s - merged_s)
        del state, gradient
    peak = resident_at_most(os.getpid()) - before
    merge_s, commit_s = statistics.median(merges), statistics.median(commits)
    digest_s = _median(lambda: digest(store.anchor(0).published), repeats)
    fleet = Machines(num_learners=contributors, syncer_cores=threads, memory_bytes_per_s=memory_bytes_per_s(threads))
    byte_s = memcpy_s / (8 * numel)
    next_nbytes = (2 + 12 + 1 + 2 / BLOCK_SIZE) * numel
    return {
        "numel": numel,
        "contributors": contributors,
        "threads": threads,
        **{f"{name}_over_memcpy": found_s / memcpy_s for name, found_s in times.items()},
        "merge_over_floor": merge_s / ((2 * contributors + 2) * numel * byte_s),
        "commit_over_floor": commit_s / (27 * numel * byte_s),
        "merge_s": merge_s,
        "commit_s": commit_s,
        "digest_s": digest_s,
        "memcpy_gb_s": 1e-9 / byte_s,
        "memory_gb_s": 1e-9 * fleet.memory_bytes_per_s,
        "plan_over_measured": numel * merge_s_per_value(fleet) / (merge_s + commit_s),
        "peak_over_fragment": (peak - next_nbytes) / (4 * numel),
    }


def _of_learner(store: AnchorStore, contributors: int, repeats: int) -> tuple[float, dict[str, float], list[Tensor]]:
    """Seed the store; return the seconds of a memcpy, of encoding and of decoding, and the payloads of a round."""
    numel = store.layouts[0].padded_numel
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(values)
    payloads = [encode(values.roll(m), wire="int8", block_size=BLOCK_SIZE, name="x") for m in range(contributors)]
    times = {
        "memcpy": _median(lambda: np.copyto(out.numpy(), values.numpy()), repeats),
        "encode": _median(lambda: encode(values, wire="int8", block_size=BLOCK_SIZE, name="x"), repeats),
        "decode": _median(lambda: Decoder(payloads[0], numel, "int8", BLOCK_SIZE).read(0, out), repeats),
    }
    store.seed(0, values)
    return times.pop("memcpy"), times, payloads


def _median(call: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats + 1):  # the first one touches the memory
        began_s = time.perf_counter()
        call()
        found.append(time.perf_counter() - began_s)
    return statistics.median(found[1:])


def _row(numel: float, contributors: int, threads: int, repeats: int, *, compiled: bool = True) -> dict[str, Any]:
    """Measure one row in a new process."""
    options = f"{int(numel)}, {contributors}, {threads}, repeats={repeats}, compiled={compiled}"
    code = f"import json; from tests.bench.syncer_round import measure; print(json.dumps(measure({options})))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Print the table, or the only row as JSON; return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, nargs="+", default=[64e6], help="parameters of the fragment")
    parser.add_argument("--contributors", type=int, nargs="+", default=[4])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON; one object if there is one row")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    chosen = [(n, m, t) for n in args.numel for m in args.contributors for t in args.threads]
    rows = [_row(*each, args.repeats) for each in chosen]
    control = _row(min(args.numel), min(args.contributors), min(args.threads), 1, compiled=False)
    checks = {
        f"{name} {max(row[name] for row in rows):.2f} at most, bound {bound}": all(row[name] <= bound for row in rows)
        for name, bound in {**BOUNDS, "peak_over_fragment": PEAK_BOUND}.items()
    }
    worst = max((row["plan_over_measured"] for row in rows), key=lambda ratio: abs(ratio - 1))
    checks[f"plan_over_measured {worst:.2f} at worst, bound 1 +- {FORECAST}"] = abs(worst - 1) <= FORECAST
    by_threads = {(row["numel"], row["contributors"], row["threads"]): row["merge_s"] for row in rows}
    gains = [s / by_threads[n, m, 2] for (n, m, t), s in by_threads.items() if t == 1 and (n, m, 2) in by_threads]
    if gains:
        checks[f"a merge with two threads is {min(gains):.2f} times as fast at least, bound 1"] = min(gains) > 1
    missed = [name for name, bound in BOUNDS.items() if control[name] > bound]
    checks[f"control: torch misses {', '.join(missed) or 'none of them'}"] = bool(missed)
    results = {"circumstances": report.circumstances(), "rows": rows, "control": control, "checks": checks}
    if args.json:
        say(json.dumps({**rows[0], "checks": checks} if len(rows) == 1 else results, indent=1))
    else:
        say(f"{report.table(rows)}\n\n{report.verdicts(checks)}")
    report.store(args.out, results)
    return int(not all(checks.values()))


if __name__ == "__main__":
    sys.exit(main())
