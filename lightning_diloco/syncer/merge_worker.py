"""Compute outer gradients from contributions, and durable commits from outer gradients.

1. The merge thread does this work, one round at a time. A `MergeJob` holds its payloads, so they stay valid even if the
   loop thread drops them in the meantime.
2. `merge` changes no anchor. `commit` computes the next state of a fragment and then makes its log record durable. The
   loop thread installs the state, so that anchors and state machine change together.
3. The judge compares the contributions of a round before the merge (`judging.py`). If it refuses a contribution,
   `merge` merges nothing, and the state machine starts the merge again without this contribution. If a contribution is
   scaled down, its learner keeps the part that was cut off, as local progress. If all contributions are finite but
   their sum is not, the syncer refuses the longest contribution and merges the others again.
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
    """A merge of one round, with the payloads of its contributions, followed by those of contributions on trial."""

    action: actions.Merge
    payloads: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class DurableCommit:
    """A commit whose record, of this lsn, is on disk."""

    lsn: int
    event: events.Committed
    anchor: Anchor
    contributions: tuple[actions.Contribution, ...]
    report: MergeReport


@dataclass(frozen=True, slots=True)
class _Gradient:
    """An outer gradient, bfloat16 (P,), with its inputs and its report."""

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
    """The work of the merge thread.

    Args:
        durable: store that makes commits durable.
        recorder: also keeps the bytes of contributions; None: they are not kept.
        disk_failed: called with the error text if the disk fails to write a commit.
    """

    def __init__(self, durable: SyncerStore, recorder: Recorder | None, disk_failed: Callable[[str], None]) -> None:
        self._durable = durable
        self._recorder = recorder
        self._disk_failed = disk_failed
        self._gradients: dict[int, _Gradient] = {}
        self._judge = Judge(durable.past.usual)

    def merge(self, store: AnchorStore, job: MergeJob) -> list[events.SyncerEvent]:
        """Compute a round's outer gradient; return events for the state machine."""
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
        """Make a commit durable; return the commit to install, or events for the state machine if it failed."""
        p, gradient = job.fragment, self._gradients.pop(job.fragment)
        assert gradient.job.action.round == job.round
        try:
            anchor = store.next_state(p, gradient.values, work=job.work)
        except NonFiniteError as error:
            # In this order: while a commit is being written, the state machine ignores payloads of its members.
            return [events.CommitFailed(p, job.round, str(error)), _refuse_longest(gradient, str(error))]
        hashing = threading.Thread(target=getattr, args=(anchor, "digest"), name="diloco-digest")
        hashing.start()  # in parallel with the disk write
        try:
            record = job.record
            if self._recorder is not None:
                self._recorder.keep(gradient.recorded(record))
            lsn = self._durable.write(record, bytes_of(gradient.values))
        except StorageError as error:
            self._disk_failed(str(error))
            return [events.CommitFailed(p, job.round, str(error))]
        finally:
            hashing.join()
        made = events.Committed(p, job.round, anchor.digest)
        return [DurableCommit(lsn, made, anchor, gradient.job.action.contributions, gradient.report)]


def _refuse_longest(gradient: _Gradient, problem: str) -> events.PayloadReceived:
    norms, contributions = gradient.report.norms, gradient.job.action.contributions
    longest = contributions[max(range(len(norms)), key=norms.__getitem__)]
    text = f"norm {max(norms):.3g}, the longest of {len(norms)}: {problem}"
    return events.PayloadReceived(longest.session, longest.ready, text)
