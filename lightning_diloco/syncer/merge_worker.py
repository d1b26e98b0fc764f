"""Compute outer gradients from contributions, and durable commits from outer gradients.

1. The thread of a shard does this work, one round at a time (`shards/shard.py`).
2. `merge` changes no anchor. `commit` computes the next state of a fragment and then makes its log record durable. The
   state is installed afterwards, when the commit may be announced.
3. The judge compares the contributions of a round before the merge (`judging.py`). If it refuses a contribution,
   `merge` merges nothing, and the state machine starts the merge again without this contribution. If a contribution is
   scaled down, its learner keeps the part that was cut off, as local progress. If all contributions are finite but
   their sum is not, the syncer refuses the longest contribution and merges the others again.
4. If the process of a shard fails during a merge, there is no result. The state machine gets `PayloadsLost` when the
   shard is back, and starts the merge again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from lightning_diloco.core.merge import MergeReport
from lightning_diloco.errors import NonFiniteError, ShardError, StorageError
from lightning_diloco.protocol import actions, events
from lightning_diloco.syncer.judging import Judge
from lightning_diloco.syncer.shards.requests import Recording, numbers
from lightning_diloco.syncer.shards.shard import MergeJob, Prepared, Shard
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.base import Json

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DurableCommit:
    """A commit whose record, of this lsn, is on disk."""

    lsn: int
    event: events.Committed
    action: actions.Apply
    prepared: Prepared
    contributions: tuple[actions.Contribution, ...]
    report: MergeReport


@dataclass(frozen=True, slots=True)
class _Gradient:
    """An outer gradient that the shard keeps: its inputs and its report."""

    job: MergeJob
    max_norms: tuple[float, ...]
    report: MergeReport

    def recording(self, record: Json) -> Recording:
        return Recording(record, tuple(c.session for c in self.job.action.contributions), numbers(self.max_norms))


class MergeWorker:
    """The work of the threads of all shards.

    Args:
        durable: store that makes commits durable.
        is_recorded: shards also store the bytes of contributions.
        disk_failed: called with the error text if the disk fails to write a commit.
    """

    def __init__(self, durable: SyncerStore, is_recorded: bool, disk_failed: Callable[[str], None]) -> None:
        self._durable = durable
        self._is_recorded = is_recorded
        self._disk_failed = disk_failed
        self._gradients: dict[int, _Gradient] = {}
        self._judge = Judge(durable.past.usual)

    def merge(self, shard: Shard, job: MergeJob) -> list[events.SyncerEvent]:
        """Compute a round's outer gradient; return events for the state machine."""
        p, contributions = job.action.fragment, job.action.contributions
        try:
            measured = shard.measure(job)
            judged = self._judge.judge(p, contributions, job.action.on_trial, measured)
            if judged.refused.keys() & {c.session for c in contributions}:
                return [events.Merged(p, job.action.round, verdicts=judged.refused)]
            outcome = shard.merge(job, judged.max_norms, measured)
        except ShardError as error:
            log.warning("fragment %d is merged again when its shard is back: %s", p, error)
            return []
        gradient = _Gradient(job, judged.max_norms, outcome.report)
        kept = {c.session: part for c, part in zip(contributions, outcome.report.kept, strict=True) if part < 1}
        merged = events.Merged(p, job.action.round, kept, judged.verdicts)
        if not outcome.is_finite:
            return [_refuse_longest(gradient, "the sum of this round's contributions is not finite"), merged]
        self._gradients[p] = gradient
        return [merged]

    def commit(self, shard: Shard, action: actions.Apply) -> list[events.SyncerEvent | DurableCommit]:
        """Make a commit durable; return the commit to install, or events for the state machine if it failed."""
        p, gradient = action.fragment, self._gradients.pop(action.fragment)
        assert gradient.job.action.round == action.round
        try:
            with shard.deciding():
                prepared = shard.prepare(
                    action.commit, gradient.recording(action.record) if self._is_recorded else None
                )
                with prepared.hashing():
                    lsn = self._durable.write({**action.record, "shard_lsn": prepared.lsn}, prepared.gradient)
                shard.decided(action.commit)
        except NonFiniteError as error:
            # In this order: while a commit is being written, the state machine ignores payloads of its members.
            return [events.CommitFailed(p, action.round, str(error)), _refuse_longest(gradient, str(error))]
        except (StorageError, ShardError) as error:
            if isinstance(error, StorageError):
                self._disk_failed(str(error))
            return [events.CommitFailed(p, action.round, str(error))]
        event = events.Committed(p, action.round, prepared.digest)
        return [DurableCommit(lsn, event, action, prepared, gradient.job.action.contributions, gradient.report)]


def _refuse_longest(gradient: _Gradient, problem: str) -> events.PayloadReceived:
    norms, contributions = gradient.report.norms, gradient.job.action.contributions
    longest = contributions[max(range(len(norms)), key=norms.__getitem__)]
    text = f"norm {max(norms):.3g}, the longest of {len(norms)}: {problem}"
    return events.PayloadReceived(longest.session, longest.ready, text)
