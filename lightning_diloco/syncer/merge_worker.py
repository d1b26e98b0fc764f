"""Compute outer gradients from contributions, and durable commits from outer gradients.

1. Each shard has a thread, which does this work, one round at a time (`shards/shard.py`).
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
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_diloco.core.merge import MergeReport
from lightning_diloco.errors import NonFiniteError, ShardError, StorageError
from lightning_diloco.process.threads import compute_alone
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
    """The work of the threads of all shards. Fragment p belongs to shard p % num_shards.

    Args:
        shards: all shards of the run.
        durable: store that makes commits durable.
        is_recorded: shards also store the bytes of contributions.
        disk_failed: called with the error text if the disk fails to write a commit.
    """

    def __init__(
        self, shards: Sequence[Shard], durable: SyncerStore, is_recorded: bool, disk_failed: Callable[[str], None]
    ) -> None:
        self._shards, self._durable = shards, durable
        self._jobs = [queue.SimpleQueue[MergeJob | actions.Apply | None]() for _ in shards]
        self._is_recorded = is_recorded
        self._disk_failed = disk_failed
        self._gradients: dict[int, _Gradient] = {}
        self._judge = Judge(durable.past.usual)

    def shard_of(self, p: int) -> Shard:
        """Return the shard of a fragment."""
        return self._shards[p % len(self._shards)]

    def put(self, action: actions.Merge | actions.Apply) -> None:
        """Queue a merge or a commit. Loop thread."""
        p = action.fragment
        job = self.shard_of(p).job(action) if isinstance(action, actions.Merge) else action
        self._jobs[p % len(self._jobs)].put(job)

    def end(self) -> None:
        """End `run` of all shards after what waits now."""
        for jobs in self._jobs:
            jobs.put(None)

    def run(
        self, k: int, announce: Callable[[DurableCommit], object], hear: Callable[[events.SyncerEvent], object]
    ) -> None:
        """Do the work of shard k until `end`; pass on what comes of it. The thread of the shard."""
        if k == 0:
            compute_alone()
        while (job := self._jobs[k].get()) is not None:
            for made in self.merge(job) if isinstance(job, MergeJob) else self.commit(job):
                if isinstance(made, DurableCommit):
                    announce(made)
                else:
                    hear(made)

    def merge(self, job: MergeJob) -> list[events.SyncerEvent]:
        """Compute a round's outer gradient; return events for the state machine."""
        p, contributions = job.action.fragment, job.action.contributions
        shard = self.shard_of(p)
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

    def commit(self, action: actions.Apply) -> list[events.SyncerEvent | DurableCommit]:
        """Make a commit durable; return the commit to install, or events for the state machine if it failed."""
        p, gradient, shard = action.fragment, self._gradients.pop(action.fragment), self.shard_of(action.fragment)
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
