"""Kills a syncer many times in one run and checks that each restored state is bit-exact.

python -m tests.bench.recoveries --out tests/bench/results/recoveries.json

1. The syncer kills itself at random points within and between its writes, and loses an arbitrary part of the data that
   it had not fsynced (`watched_syncer.py`). Real learners train on, and one of them is also killed.
2. A journal records what each syncer process computed, wrote and sent. These checks must hold after each restart:
   - bits: master, published values and momentum of each fragment equal those that were installed at that version, or
     those computed for it if the kill came between disk and installation.
   - told: no fragment is older than what a learner was told, no durable record is missing, and the generation is the
     same.
   - merged: the ledger's merged ranges are those of the written commits, up to the restored versions.
   - discarded: the ledger's entries of learners that are gone are unchanged.
3. The run then ends by itself, its ledger is exact, and `replay` reproduces it from the received bytes.
4. The control runs without fsync, and a check must fail.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_diloco.cli.local.feed import Status
from lightning_diloco.cli.local.fleet import Fleet
from lightning_diloco.cli.run import syncer_argv
from lightning_diloco.errors import StorageError
from lightning_diloco.syncer.replay import replay
from tests.bench import local_run, report

LEARNERS = 3
STEP_S = 0.03
MATRICES = 12
COMMITS_AT_THE_END = 8
LIMIT_S = 900.0
CHECKS = ("bits", "told", "merged", "discarded")
Line = dict[str, Any]


class Director:
    """Follows the journal, kills a learner from time to time, and ends the run after the last recovery.

    Args:
        journal: folder with a file per syncer process.
        num_kills: number of times that the syncer is killed.
        end: file whose appearance ends the learners.
    """

    def __init__(self, journal: Path, num_kills: int, end: Path) -> None:
        self._journal, self._num_kills, self._end = journal, num_kills, end
        self._kill_at = [num_kills // 3, 2 * num_kills // 3]
        self._commits_before_end: int | None = None
        self._until_s = time.monotonic() + LIMIT_S

    def __call__(self, fleet: Fleet, status: Status | None) -> None:
        num_lives = len(list(self._journal.glob("life-*")))
        if self._kill_at and num_lives > self._kill_at[0]:
            self._kill_at.pop(0)
            os.killpg(fleet.pid(f"l{LEARNERS - 1}"), signal.SIGKILL)
        if num_lives > self._num_kills and status is not None:
            if self._commits_before_end is None:
                self._commits_before_end = status["num_commits"]
            elif status["num_commits"] >= self._commits_before_end + COMMITS_AT_THE_END:
                self._end.touch()
        if time.monotonic() > self._until_s:
            raise TimeoutError(f"{num_lives - 1} recoveries of {self._num_kills} after {LIMIT_S:.0f} s")


def run(num_kills: int, seed: int, *, fsync: bool = True) -> dict[str, Any]:
    """Run once; return the results of the run and of each recovery."""
    with tempfile.TemporaryDirectory(prefix="diloco-recoveries-") as name:
        run_dir, journal, end = (Path(name) / part for part in ("run", "journal", "end"))
        given = json.dumps({"journal": str(journal), "seed": seed, "num_kills": num_kills, "fsync": fsync})
        syncer = (sys.executable, "-m", "tests.bench.watched_syncer", given, *syncer_argv(run_dir, LEARNERS)[4:])
        ended = local_run.run(
            run_dir,
            ("tests.bench.idle_learner", "--until-file", end, "--step-s", STEP_S, "--matrices", MATRICES),
            LEARNERS,
            Director(journal, num_kills, end),
            syncer_argv=(*syncer, "--record", "contributions"),
            max_restarts=2 * num_kills,
        )
        summary = ended.summary or {}
        return {
            "exit_code": ended.exit_code,
            "ledger_exact": bool(summary.get("ledger_exact")),
            "replayed": _replayed(run_dir),
            "recoveries": recoveries(read_lives(journal)),
            "steps": sum(learner["step"] for learner in summary.get("learners", ())),
            "tokens_discarded": summary.get("tokens_discarded"),
        }


def _replayed(run_dir: Path) -> str:
    try:
        return replay(run_dir).level
    except StorageError as error:
        return str(error)


def read_lives(journal: Path) -> list[list[Line]]:
    """Return the journal lines of every syncer process, in order."""
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(journal.glob("life-*"))]


def recoveries(lives: Sequence[Sequence[Line]]) -> list[dict[str, Any]]:
    """Compare each restored state with the journals of all earlier processes."""
    found = []
    for number in range(1, len(lives)):
        before, life = [line for earlier in lives[:number] for line in earlier], lives[number]
        restored = next((line for line in life if line["what"] == "restored"), None)
        killed = next((line["point"] for line in lives[number - 1] if line["what"] == "killed"), "it gave up")
        cuts = [line for line in life if line["what"] == "cut"]
        row = {
            "recovery": number,
            "killed at": killed,
            "bytes cut": sum(cut["of"] - cut["kept"] for cut in cuts),
            "lsn": restored and restored["lsn"],
            **dict.fromkeys(CHECKS, False),
        }
        if restored is not None:
            row |= _compare(before, lives[number - 1], restored)
            died_s = lives[number - 1][-1]["t"]
            row["rounds go on after [s]"] = next((x["t"] - died_s for x in life if x["what"] == "told"), None)
        found.append(row)
    return found


def _compare(before: Sequence[Line], last_life: Sequence[Line], restored: Line) -> dict[str, bool]:
    fragments = restored["fragments"]
    return {
        "bits": all(_is_known(before, last_life, p, fragment) for p, fragment in enumerate(fragments)),
        "told": _nothing_told_is_lost(before, restored),
        "merged": _merged(before, fragments) == _ranges(restored["accounts"]),
        "discarded": _discarded_is_kept(before, restored["accounts"]),
    }


def _is_known(before: Sequence[Line], last_life: Sequence[Line], p: int, restored: Line) -> bool:
    """Whether the fragment has the bits that were installed or, if none were, the bits computed for that version."""
    key = (restored["generation"], restored["version"])

    def bits(lines: Sequence[Line], what: str) -> list[Any]:
        found = (line for line in lines if line["what"] == what and line["fragment"] == p)
        return [line["bits"] for line in found if (line["generation"], line["version"]) == key]

    starts = [line["fragments"][p] for line in before if line["what"] == "restored" and line["fragments"]]
    seen = [line["bits"] for line in starts if (line["generation"], line["version"]) == key] + bits(before, "installed")
    if restored["version"] == 0 and not seen:  # the initial values, which are not computed
        return True
    return all(found == restored["bits"] for found in seen) if seen else restored["bits"] in bits(last_life, "computed")


def _nothing_told_is_lost(before: Sequence[Line], restored: Line) -> bool:
    held = [(fragment["generation"], fragment["version"]) for fragment in restored["fragments"]]
    told = [line for line in before if line["what"] == "told"]
    if told and not held:
        return False
    is_new = any(line["generation"] != held[line["fragment"]][0] for line in told)
    is_behind = any((line["generation"], line["version"]) > held[line["fragment"]] for line in told)
    return not is_new and not is_behind and restored["lsn"] >= max((x["lsn"] for x in before if "lsn" in x), default=0)


def _merged(before: Sequence[Line], fragments: Sequence[Line]) -> dict[tuple[str, int], list[list[list[int]]]]:
    """Return the ranges of the written commits per account and fragment; adjacent ranges are joined."""
    written = [line["record"] for line in before if line["what"] == "writing"]
    owners = {r["session"]: (r["learner"], r["incarnation"]) for r in written if r["kind"] == "Granted"}
    commits = {(r["fragment"], r["version"]): r for r in written if r["kind"] == "CommitRecord"}
    ranges: dict[tuple[str, int], list[list[list[int]]]] = defaultdict(lambda: [[] for _ in fragments])
    for (p, version), record in sorted(commits.items()):
        for merge in record["merges"] if version <= fragments[p]["version"] else ():
            start, stop = merge["ready"]["start"], merge["ready"]["stop"]
            ranges[owners[merge["session"]]][p].append([start, start + int((stop - start) * merge["kept"])])
    return {owner: [_joined(found) for found in by_fragment] for owner, by_fragment in ranges.items()}


def _joined(ranges: Sequence[list[int]]) -> list[list[int]]:
    joined: list[list[int]] = []
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    return joined


def _ranges(accounts: Sequence[Line]) -> dict[tuple[str, int], list[list[list[int]]]]:
    return {(a["learner"], a["incarnation"]): a["merged"] for a in accounts if any(a["merged"])}


def _discarded_is_kept(before: Sequence[Line], accounts: Sequence[Line]) -> bool:
    booked = {tuple(line["account"]): line["booked"] for line in before if line["what"] == "booked"}
    return all(a["booked"] == booked.get((a["learner"], a["incarnation"])) for a in accounts if a["is_closed"])


def checks_of(found: dict[str, Any], control: dict[str, Any], num_kills: int) -> dict[str, bool]:
    """Return the checks."""
    good = [row for row in found["recoveries"] if all(row[name] for name in CHECKS)]
    lost = [row for row in control["recoveries"] if not all(row[name] for name in CHECKS)]
    slowest = max((row["rounds go on after [s]"] or 0.0 for row in found["recoveries"]), default=0.0)
    return {
        f"{len(good)} of {num_kills} recoveries are bit-exact": len(good) == num_kills == len(found["recoveries"]),
        f"rounds go on {slowest:.1f} s after the kill, at the latest; at most 5 s": 0.0 < slowest < 5.0,
        "the run ended by itself with an exact ledger": found["exit_code"] == 0 and found["ledger_exact"],
        "replayed from the received bytes, bit for bit": found["replayed"] == "merges",
        f"control: without fsync {len(lost)} of {len(control['recoveries'])} recoveries are not": bool(lost),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and store; return 1 if a recovery is not exact, or if all of the control's are."""
    parser = report.options(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--control-kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    found = run(args.kills, args.seed)
    control = run(args.control_kills, args.seed, fsync=False)
    checks = checks_of(found, control, args.kills)
    rows = [{"run": name, **row} for name, run_ in (("", found), ("control", control)) for row in run_["recoveries"]]
    return report.conclude(args.out, rows, checks, found=found, control=control)


if __name__ == "__main__":
    raise SystemExit(main())
