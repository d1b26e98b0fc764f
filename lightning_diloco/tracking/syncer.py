"""The syncer's W&B run, written from the tape as it grows: fleet, rounds, outer steps and anchor.

1. It only reads the tape, so a slow or unreachable W&B delays no round.
2. A restarted syncer continues the same W&B run with new events only, because earlier ones have already been logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_diloco.storage.local_runs import summary_of
from lightning_diloco.storage.tape import TAPE, read_new
from lightning_diloco.syncer.status.progress import EVENT as PROGRESS
from lightning_diloco.tracking.session import AXIS, Session
from lightning_diloco.transport.address import read_join_file

log = logging.getLogger(__name__)

_PERIOD_S = 1.0


@contextmanager
def tracked(run_dir: Path, project: str) -> Iterator[None]:
    """Return a context that logs the run in this directory while the block serves it."""
    join, tape = run_dir / "join", run_dir / TAPE
    began, over = time.time(), threading.Event()

    def work() -> None:
        while not (join.exists() and join.stat().st_mtime >= began):
            if over.wait(_PERIOD_S / 5):
                return
        run = read_join_file(join).run
        session = Session(project, run=run, who="syncer", folder=run_dir / "syncer", config={})
        rows, position, is_last = Rows(), 0, False
        while not is_last:
            is_last = over.wait(_PERIOD_S)
            lines, position = read_new(tape, position)
            for row in rows.of([line for line in lines if line["t"] >= began]):
                session.log(row)
        session.finish(summary=summary_of(run_dir) or {})

    def guarded() -> None:
        try:
            work()
        except Exception:
            log.exception("the run continues, but is no longer logged to W&B")

    thread = threading.Thread(target=guarded, name="diloco-wandb", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Rows:
    """Converter of tape lines to W&B rows."""

    def __init__(self) -> None:
        self._num: Counter[str] = Counter()

    def of(self, lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the row of each line that has one."""
        for line in lines:
            self._num[line["event"]] += 1
            if make := _ROWS.get(line["event"]):
                yield make(line)
            elif line["event"] in ("join", "lapse"):
                yield {f"fleet/num_{line['event']}s": self._num[line["event"]]}


def _progress(line: Mapping[str, Any]) -> dict[str, Any]:
    there = [learner for learner in line["learners"] if learner["phase"] not in ("left", "lapsed")]
    losses = {name: [one[name] for one in there if one[name] is not None] for name in ("loss", "eval_loss")}
    ledger = line["ledger"]
    fates = {"seen": ledger["seen"], "merged": ledger["merged"], "pending": ledger["pending"]}
    return {
        AXIS: line["fleet_tokens"],
        "fleet/learners": len(there),
        "fleet/tokens_per_s": sum(learner["tokens_per_s"] for learner in there),
        "fleet/staleness_versions": max((learner["staleness_versions"] for learner in there), default=None),
        **{f"fleet/{name}": line[name] for name in ("participation", "goodput", "bytes_up", "bytes_down")},
        **{f"fleet/ledger_{fate}": tokens for fate, tokens in fates.items()},
        "fleet/ledger_discarded": sum(ledger["discarded"].values()),
        "train/loss": fmean(losses["loss"]) if losses["loss"] else None,
        "eval/loss": fmean(losses["eval_loss"]) if losses["eval_loss"] else None,
    }


def _commit(line: Mapping[str, Any]) -> dict[str, Any]:
    quorum_s = line["quorum_s"]
    return {
        "fleet/round_s": line["round_s"],
        "fleet/quorum_s": quorum_s,
        "fleet/grace_s": None if quorum_s is None else max(0.0, line["collect_s"] - quorum_s),
        "fleet/contributors": len(line["learners"]),
        "outer/version": line["version"],
        "outer/staleness_versions": max(line["staleness"]),
        "outer/steps": fmean(line["steps"]),
    }


def _outer(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "outer/lr": line.get("lr"),  # versions before did not write it
        "outer/gradient_norm": line["merged_norm"],
        "outer/contribution_norm": fmean(line["norms"]),
        "outer/cosine": fmean(line["cosines"]),
        "outer/smallest_cosine": min(line["cosines"]),
    }


def _evaluated(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"eval/final_loss": line["eval_loss"]}


_ROWS = {PROGRESS: _progress, "commit": _commit, "outer": _outer, "evaluated": _evaluated}
