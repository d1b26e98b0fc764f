"""Kills the serving syncer of a run repeatedly; its standby takes over each time, and the killed one follows.

python -m tests.bench.takeovers --out tests/bench/results/takeovers.json
python -m tests.bench.takeovers --shards 3 --takeovers 10                        each syncer with two more processes

1. Two syncers and two learners are processes of this machine, over Flight with TLS. Every second fault suspends the
   syncer instead, so that it vanishes without a word, and kills it after the takeover. A fault hits its shards, too.
2. A takeover lasts from the signal to the first new commit at the other syncer, as an onlooker's `status` shows it.
3. Learners time their own calls of the strategy. With n takeovers, the n-th longest call is compared with that of a run
   of about the same time without a standby or faults, in which processes start as often. (Starts take most of a core
   for seconds.) If each takeover held a learner up once, this call would be as long.
4. At the end, the ledger must be exact, learners must hold the bits on disk, a replay of the log must give the same
   bits, and the tape must have no version of a fragment twice. (It may lack those of the last second before a fault.)
5. The control is a standby that was away while the primary continued. It gets the command to take over, and the checks
   must detect that commits are lost.
"""

from __future__ import annotations

import json
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_diloco.storage.tape import read_tape
from lightning_diloco.syncer.replay import replay
from tests.bench import report
from tests.e2e.conftest import Processes, until
from tests.e2e.learner import TOKENS
from tests.e2e.pair import COMMAND, Pair
from tests.e2e.test_processes import NUM_FRAGMENTS, restored

LEARNERS = ("l0", "l1")
COMMITS_BETWEEN = 8
MAX_TAKEOVER_S = 10.0
MAX_LONGER_S = 0.05
BETWEEN_S = 10.0  # about that of takeovers


def take_over(pair: Pair, primary: int, sign: signal.Signals) -> float:
    """End the serving syncer; return the seconds until the other one commits, then start the former one again."""
    pair.send(primary, sign)
    began_s = time.monotonic()
    pair.until_commits(1 - primary, 1)
    took_s = time.monotonic() - began_s
    pair.kill(primary)
    pair.restart(primary)
    pair.until_registered(1 - primary)
    return took_s


def finish(pair: Pair, primary: int, processes: Sequence[Any]) -> dict[str, Any]:
    """End the learners; return what is found afterwards."""
    pair.processes.stop_file.touch()
    exits = [pair.processes.end(process) for process in processes]
    summary = json.loads((pair.dirs[primary] / "summary.json").read_text())
    held = [pair.processes.held(name) for name in LEARNERS]
    versions, digests = restored(pair.dirs[primary], pair.processes.root / "copy")
    told = Counter(
        (line["fragment"], line["version"])
        for line in read_tape(pair.dirs[primary] / "tape" / "events.jsonl")
        if line["event"] == "commit"
    )
    discarded = sum(summary["tokens_discarded"].values())
    return {
        "exits": exits,
        "ledger": summary["ledger_exact"]
        and summary["tokens_seen"] == summary["tokens_merged"] + discarded
        and summary["tokens_seen"] == sum(h["steps"] for h in held) * TOKENS * NUM_FRAGMENTS,
        "nothing discarded": discarded == 0,
        "bits": all(
            h["digests"][p] == digests[p] for h in held for p in range(NUM_FRAGMENTS) if h["landed"][p] == versions[p]
        ),
        "replayed": replay(pair.dirs[primary]).versions == tuple(versions),
        "no version twice": max(told.values()) == 1 and all(version <= versions[p] for p, version in told),
        "longest_hooks_s": [h["longest_hooks_s"] for h in held],
        "commits": summary["rounds"],
    }


def disturbed(root: Path, num_takeovers: int, num_shards: int) -> dict[str, Any]:
    """Run with takeovers back and forth."""
    processes, primary, rows = Processes(root), 0, []
    try:
        pair = Pair(processes, len(LEARNERS), num_shards=num_shards)
        learners = [processes.learner(name) for name in LEARNERS]
        pair.until_registered(0)
        for k in range(num_takeovers):
            pair.until_commits(primary, COMMITS_BETWEEN)
            sign = signal.SIGSTOP if k % 2 else signal.SIGKILL
            rows.append({"fault": sign.name, "took_s": take_over(pair, primary, sign)})
            primary = 1 - primary
        pair.until_commits(primary, COMMITS_BETWEEN)
        return {"takeovers": rows, **finish(pair, primary, [*learners, *pair.running])}
    finally:
        processes.kill_all()


def undisturbed(root: Path, num_starts: int, num_shards: int) -> dict[str, Any]:
    """Run without a standby or faults, beside processes that start and end."""
    processes = Processes(root)
    try:
        syncer = processes.syncer(len(LEARNERS))
        learners = [processes.learner(name) for name in LEARNERS]
        until(lambda: processes.status()["num_commits"] >= COMMITS_BETWEEN, "commits", processes)
        for _ in range(num_starts):
            for _ in range(num_shards):
                processes.start("bystander", "-c", "import lightning_diloco.syncer.process")
            time.sleep(BETWEEN_S)
        processes.stop_file.touch()
        for process in (*learners, syncer):
            processes.end(process)
        return {"longest_hooks_s": [processes.held(name)["longest_hooks_s"] for name in LEARNERS]}
    finally:
        processes.kill_all()


def control(root: Path, num_shards: int) -> dict[str, Any]:
    """Run with a takeover by a standby that missed commits."""
    processes = Processes(root)
    try:
        pair = Pair(processes, len(LEARNERS), num_shards=num_shards)
        learners = [processes.learner(name) for name in LEARNERS]
        pair.until_registered(0)
        pair.until_in_contact()
        pair.kill(1)
        until(lambda: (s := pair.status(0)) and s["standby"] is None, "commits without the standby", processes)
        pair.until_commits(0, COMMITS_BETWEEN)
        pair.kill(0)
        words = ("--run-dir", pair.dirs[1], "--expect", len(LEARNERS), "--take-over")
        pair.running[1] = processes.start("syncer1", *COMMAND, *words)
        pair.until_commits(1, COMMITS_BETWEEN)
        return finish(pair, 1, [*learners, pair.running[1]])
    finally:
        processes.kill_all()


def _nth_longest_s(run: dict[str, Any], n: int) -> float:
    return max(hooks_s[n - 1] for hooks_s in run["longest_hooks_s"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print and store the results; return 1 if a check fails."""
    parser = report.options(__doc__)
    parser.add_argument("--takeovers", type=int, default=20)
    parser.add_argument("--shards", type=int, default=1, help="of each syncer")
    args = parser.parse_args(argv)
    found, num, num_shards = [], args.takeovers, args.shards
    for run in (
        partial(disturbed, num_takeovers=num, num_shards=num_shards),
        partial(undisturbed, num_starts=num, num_shards=num_shards),
        partial(control, num_shards=num_shards),
    ):
        with tempfile.TemporaryDirectory(prefix="diloco-takeovers-") as root:
            found.append(run(Path(root)))
    faults, quiet, late = found
    rows = []
    for name, fault in (("killed", "SIGKILL"), ("vanishes", "SIGSTOP")):
        took_s = [row["took_s"] for row in faults["takeovers"] if row["fault"] == fault]
        rows.append(
            {
                "the syncer": name,
                "takeovers": len(took_s),
                "rounds go on after [s], median": round(statistics.median(took_s), 1),
                "at the latest": round(max(took_s), 1),
            }
        )
    longest_s = max(row["took_s"] for row in faults["takeovers"])
    longer_s = _nth_longest_s(faults, num) - _nth_longest_s(quiet, num)
    checks = {
        f"rounds go on {longest_s:.1f} s after the fault, at the latest; at most {MAX_TAKEOVER_S:.0f} s": longest_s
        <= MAX_TAKEOVER_S,
        f"the {num}th longest call of a learner is {1000 * longer_s:+.0f} ms longer than without faults, at most "
        f"{1000 * MAX_LONGER_S:.0f} ms": longer_s <= MAX_LONGER_S,
        f"the ledger of {faults['commits']} commits is exact, and nothing was discarded": faults["ledger"]
        and faults["nothing discarded"],
        "learners hold the bits that are on disk": faults["bits"],
        "a replay of the log gives these bits": faults["replayed"],
        "no version of a fragment was committed twice": faults["no version twice"],
        "all processes ended by themselves": not any(faults["exits"]),
        "control: a standby that missed commits loses some, and the ledger says so": late["ledger"]
        and not late["nothing discarded"],
    }
    command = f"python -m tests.bench.takeovers --shards {num_shards} --takeovers {num}" if num_shards > 1 else None
    return report.conclude(
        args.out, rows, checks, command=command, runs={"faults": faults, "quiet": quiet, "control": late}
    )


if __name__ == "__main__":
    raise SystemExit(main())
