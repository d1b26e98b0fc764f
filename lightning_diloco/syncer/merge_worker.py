"""The syncer's arithmetic: contributions to an outer gradient, an outer gradient to a durable commit.

1. One thread does it, a round at a time, on payloads it was handed: whatever happens to them meanwhile, they stay.
2. `merge` changes nothing. `commit` computes the next state, then makes the record durable; installing the state is
   left to the caller, so that anchors and machine change together.
3. Contributions are compared first (`judging.py`). If one is refused, nothing is merged: the machine has the round
   merged again without it. One that is only scaled down leaves what was cut off to its learner, as progress. Finite
   contributions whose sum is not lose the longest one, likewise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_diloco.core.blocks import all_finite
from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.core.merge import MergeReport
from lightning_diloco.errors import NonFiniteError, StorageError
from lightning_diloco.protocol import actions, events
from lightning_diloco.syncer.anchors import Anchor, AnchorStore
from lightning_diloco.syncer.contribution_archive import Recorded, Recorder
from lightning_diloco.syncer.judging import Judge
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.base import Json


@dataclass(frozen=True, slots=True)
class MergeJob:
    """A round's contributions with their bytes, and after them the bytes of those on trial."""

    action: actions.Merge
    payloads: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class DurableCommit:
    """A commit whose record is on disk."""

    event: events.Committed
    anchor: Anchor
    contributions: tuple[actions.Contribution, ...]
    report: MergeReport


@dataclass(frozen=True, slots=True)
class _Gradient:
    """An outer gradient, bfloat16 (P,), and what it was made of."""

    job: MergeJob
    max_norms: tuple[float, ...]
    values: Tensor
    report: MergeReport

    def recorded(self, record: Json) -> Recorded:
        return Recorded(
            record=record,
            sessions=tuple(c.session for c in self.job.action.contributions),
            max_norms=self.max_norms,
            payloads=self.job.payloads,
        )


class MergeWorker:
    """What the merge thread does.

    Args:
        durable: where commits are made durable.
        recorder: keeps the bytes of contributions, too; None: they are not kept.
        disk_failed: told when the disk does not take a commit.
    """

    def __init__(self, durable: SyncerStore, recorder: Recorder | None, disk_failed: Callable[[str], None]) -> None:
        self._durable = durable
        self._recorder = recorder
        self._disk_failed = disk_failed
        self._gradients: dict[int, _Gradient] = {}
        self._judge = Judge(durable.past.usual)

    def merge(self, store: AnchorStore, job: MergeJob) -> list[events.SyncerEvent]:
        """Compute a round's outer gradient; returns what the machine is to be told."""
        p, contributions = job.action.fragment, job.action.contributions
        measured = store.measure(p, job.payloads)
        judged = self._judge.judge(p, contributions, job.action.on_trial, measured)
        if judged.refused.keys() & {c.session for c in contributions}:
            return [events.Merged(p, job.action.round, verdicts=judged.refused)]
        job = replace(job, payloads=job.payloads[: len(contributions)])
        values_P, found = store.merge(
            p, job.payloads, job.action.shares, judged.max_norms, measured.only(len(contributions))
        )
        gradient = _Gradient(job, judged.max_norms, values_P, found)
        kept = {c.session: part for c, part in zip(contributions, found.kept, strict=True) if part < 1}
        merged = events.Merged(p, job.action.round, kept, judged.verdicts)
        if not all_finite(values_P):
            return [_refuse_longest(gradient, "the sum of this round's contributions is not finite"), merged]
        self._gradients[p] = gradient
        return [merged]

    def commit(self, store: AnchorStore, job: actions.Apply) -> list[events.SyncerEvent | DurableCommit]:
        """Make a commit durable; returns what is to be installed, or what the machine is to be told instead."""
        p, gradient = job.fragment, self._gradients.pop(job.fragment)
        assert gradient.job.action.round == job.round
        try:
            anchor = store.next_state(p, gradient.values, work=job.work)
        except NonFiniteError as error:
            # In this order: while a commit counts as being written, nothing of its members is judged.
            return [events.CommitFailed(p, job.round, str(error)), _refuse_longest(gradient, str(error))]
        hashing = threading.Thread(target=getattr, args=(anchor, "digest"), name="diloco-digest")
        hashing.start()  # while the disk writes
        try:
            record = job.record
            if self._recorder is not None:
                self._recorder.keep(gradient.recorded(record))
            self._durable.write(record, bytes_of(gradient.values))
        except StorageError as error:
            self._disk_failed(str(error))
            return [events.CommitFailed(p, job.round, str(error))]
        finally:
            hashing.join()
        made = events.Committed(p, job.round, anchor.digest)
        return [DurableCommit(made, anchor, gradient.job.action.contributions, gradient.report)]


def _refuse_longest(gradient: _Gradient, problem: str) -> events.PayloadReceived:
    norms, contributions = gradient.report.norms, gradient.job.action.contributions
    longest = contributions[max(range(len(norms)), key=norms.__getitem__)]
    text = f"norm {max(norms):.3g}, the longest of {len(norms)}: {problem}"
    return events.PayloadReceived(longest.session, longest.ready, text)
