"""Fleets of 8 to 64 learners on one syncer: who takes part, and what a learner costs.

python -m tests.bench.fleets --out tests/bench/results/fleets.json   # 20 minutes

1. Real syncer, TLS and links, one process each. Learners sleep instead of computing (`fleet_learner.py`), so that a
   small machine holds them; "cores busy" says how much of it they need. The syncer has priority over them, as if it had
   a machine of its own (this needs root).
2. Measured over MEASURED_PERIODS periods of H steps, from the second period after all learners train. The run's tape
   names the learners of each round. CPU time and memory are the kernel's.
3. hold: how long the loop thread of the syncer is busy with one event, timed around its handlers.
4. Control: a fleet in which every second learner is SLOWER times slower, at a syncer whose loop takes SLOW_S longer for
   one event of a hundred, must miss the bounds on participation and on the loop.

Source: bounds are our choice.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from lightning_diloco.storage.tape import read_tape
from tests.bench import report
from tests.bench.processes import start_syncer
from tests.e2e.conftest import Processes, until
from tests.resident import resident_now

SYNC_EVERY = 24
MEASURED_PERIODS = 2
SLOW_S, SLOWER = 0.2, 4
PARTICIPATION, ROUNDS, MERGED = 0.9, 0.9, 1.0
HOLD_S = 0.1
GROWTH = 1.5  # of the syncer's CPU time per contribution, from the smallest to the largest fleet
COLUMNS = ("run", "take part", "rounds / period", "utilization", "merged", "CPU [ms] / contribution", "hold p99.9 [ms]",
           "hold max [ms]", "syncer [MB]", "learner [MB]", "cores busy")  # fmt: skip


def measure(num_learners: int, *, step_s: float, width: int, is_control: bool = False) -> dict[str, Any]:
    """Run one fleet and return its row of the table; see rule 4 for the control."""
    with tempfile.TemporaryDirectory(prefix="diloco-fleet-") as name, contextlib.ExitStack() as stack:
        processes = Processes(Path(name))
        stack.callback(processes.kill_all)
        times = processes.root / "loop.json"
        given = json.dumps({"out": str(times), "slow_s": SLOW_S * is_control})
        syncer = start_syncer(processes, num_learners, {"sync_every": SYNC_EVERY}, ("tests.bench.timed_syncer", given))
        model = {"width": width, "num_matrices": SYNC_EVERY}
        paces_s = [SLOWER * step_s if is_control and k % 2 else step_s for k in range(num_learners)]
        crew = [_started(processes, k, {**model, "step_s": paces_s[k]}) for k in range(num_learners)]
        until(lambda: _num_training(processes.status()) == num_learners, "all learners to train", processes)
        period_s = SYNC_EVERY * step_s
        time.sleep(period_s)
        began, busy = _seen(syncer.pid), psutil.cpu_times()
        time.sleep(MEASURED_PERIODS * period_s)
        ended, idle_s = _seen(syncer.pid), psutil.cpu_times().idle - busy.idle
        resident = resident_now(syncer.pid)
        processes.stop_file.touch()
        if any(processes.end(process) for process in (*crew, syncer)):
            raise RuntimeError("a process failed; its log is above")
        learners = [processes.held(f"l{k}") for k in range(num_learners)]
        summary = processes.summary()
        holds = [took_s for ended_s, took_s in json.loads(times.read_text()) if began[0] < ended_s < ended[0]]
        lines = list(read_tape(processes.run_dir / "tape" / "events.jsonl"))
    rounds = [line["learners"] for line in lines if line["event"] == "outer" and began[1] < line["t"] < ended[1]]
    sizes = [len(merged) for merged in rounds]
    wall_s = ended[0] - began[0]
    hooks = [hook_s for one in learners for left_s, hook_s in one["hooks"] if began[0] < left_s < ended[0]]
    return {
        "run": f"M = {num_learners}",
        "take part": statistics.mean(sizes) / num_learners,
        "rounds / period": len(sizes) / SYNC_EVERY / MEASURED_PERIODS,
        "utilization": 1 - sum(hooks) / (wall_s * num_learners),
        "merged": summary["tokens_merged"] / summary["tokens_seen"],
        "CPU [ms] / contribution": 1e3 * (ended[2] - began[2]) / sum(sizes),
        "hold p99.9 [ms]": 1e3 * report.quantile(holds, 0.999),
        "hold max [ms]": 1e3 * max(holds),
        "events / s": len(holds) / wall_s,
        "loop busy": sum(holds) / wall_s,
        "syncer [MB]": resident / 1e6,
        "learner [MB]": statistics.median(one["peak_bytes"] for one in learners) / 1e6,
        "learner CPU": statistics.mean(one["cpu_s"] / one["wall_s"] for one in learners),
        "cores busy": 1 - idle_s / wall_s / (psutil.cpu_count() or 1),
        "ledger_exact": summary["ledger_exact"],
    }


def _started(processes: Processes, k: int, given: dict[str, Any]) -> subprocess.Popen[bytes]:
    own = {"until": str(processes.stop_file), "root": str(processes.root), "seed": k}
    env = {"DILOCO_JOIN": processes.address.join_string(), "DILOCO_LEARNER": f"l{k}"}
    return processes.start(f"l{k}", "-m", "tests.bench.fleet_learner", json.dumps({**given, **own}), **env)


def _num_training(status: dict[str, Any]) -> int:
    return sum(one["phase"] == "stepping" and one["step"] > 0 for one in status["learners"])


def _seen(pid: int) -> tuple[float, float, float]:
    """Return the time, on both clocks, and the CPU time of a process so far."""
    used = psutil.Process(pid).cpu_times()
    return time.monotonic(), time.time(), used.user + used.system


def main(argv: Sequence[str] | None = None) -> int:
    """Print and store the table; return 1 if a bound is missed."""
    parser = report.options(__doc__)
    parser.add_argument("--learners", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--step-s", type=float, default=2.0)
    parser.add_argument("--width", type=int, default=256, help="of the 24 square matrices of the model")
    args = parser.parse_args(argv)
    size = {"step_s": args.step_s, "width": args.width}
    rows = []
    for num_learners in args.learners:
        rows.append(measure(num_learners, **size))
        print(rows[-1], flush=True)
    control = measure(args.learners[0], **size, is_control=True) | {"run": "control"}
    found = checks(rows) | {f"control misses: {what}": not holds for what, holds in list(checks([control]).items())[:2]}
    return report.conclude(args.out, [*rows, control], found, columns=COLUMNS)


def checks(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Return whether each bound is kept."""
    part, rounds = (min(row[name] for row in rows) for name in ("take part", "rounds / period"))
    hold_ms = max(row["hold p99.9 [ms]"] for row in rows)
    cpu = [row["CPU [ms] / contribution"] for row in rows]
    return {
        f"{part:.1%} of the learners take part in a round, at least {PARTICIPATION:.0%}": part >= PARTICIPATION,
        f"the loop is busy with one event for {hold_ms:.1f} ms (p99.9), at most {1e3 * HOLD_S:.0f}": hold_ms
        <= 1e3 * HOLD_S,
        f"{rounds:.2f} rounds per fragment and period, at least {ROUNDS:g}": rounds >= ROUNDS,
        "all tokens are merged, and the ledger is exact": all(
            row["merged"] == MERGED and row["ledger_exact"] for row in rows
        ),
        f"a contribution takes {cpu[-1] / cpu[0]:.2f} times the CPU time in the largest fleet, at most {GROWTH:g}": (
            cpu[-1] <= GROWTH * cpu[0]
        ),
    }


if __name__ == "__main__":
    raise SystemExit(main())
