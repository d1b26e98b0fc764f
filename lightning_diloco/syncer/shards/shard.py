"""The interface of a shard for the merge thread, and the shard in this process.

A round of a fragment goes through `job`, `measure`, `merge`, `prepare` and `install`, in this order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from lightning_diloco.core.blocks import all_finite
from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.core.encoded import Measured
from lightning_diloco.core.merge import MergeReport
from lightning_diloco.errors import TransportError
from lightning_diloco.protocol import actions
from lightning_diloco.protocol.syncer.records import CommitRecord
from lightning_diloco.storage.files import Buffer
from lightning_diloco.syncer.anchors import Anchor, AnchorStore
from lightning_diloco.syncer.contribution_archive import Recorded, Recorder
from lightning_diloco.syncer.payloads import Payloads
from lightning_diloco.syncer.shards.requests import Recording, floats


@dataclass(frozen=True, slots=True)
class MergeJob:
    """A merge of one round.

    Args:
        action: the round and its contributions.
        payloads: payloads of its contributions, followed by those of contributions on trial; empty if another process
            holds them.
    """

    action: actions.Merge
    payloads: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a merge. Its outer gradient stays in the shard.

    Args:
        report: statistics of the contributions.
        is_finite: whether the outer gradient is finite.
    """

    report: MergeReport
    is_finite: bool


@dataclass(slots=True)
class Prepared:
    """A version that is computed, but not decided yet.

    Args:
        lr: outer learning rate of this step.
        digest: digest of the published values; "" before `hashing` has ended.
        gradient: bytes of the outer gradient for the run's log; empty if the shard has logged them.
        lsn: record of the outer gradient in the shard's log; 0 if it has none.
        anchor: the next state; None if another process holds it.
    """

    lr: float
    digest: str = ""
    gradient: Buffer = b""
    lsn: int = 0
    anchor: Anchor | None = field(default=None, repr=False)

    @contextmanager
    def hashing(self) -> Iterator[None]:
        """Compute the digest in parallel with the block, which writes to disk, if it is not known yet."""
        thread = threading.Thread(target=self._hash, name="diloco-digest")
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def _hash(self) -> None:
        self.digest = self.digest or (self.anchor.digest if self.anchor else "")


class Shard(Protocol):
    """The tensors of some fragments."""

    def job(self, action: actions.Merge) -> MergeJob:
        """Return a job whose payloads stay valid until it is done, even if they are dropped meanwhile. Loop thread."""

    def measure(self, job: MergeJob) -> Measured:
        """Compute norms and cosines of the contributions. Merge thread."""

    def merge(self, job: MergeJob, max_norms: Sequence[float], measured: Measured) -> Outcome:
        """Compute the outer gradient, and keep it until `prepare`. Merge thread.

        Args:
            job: as measured; contributions on trial are not merged.
            max_norms: norm limit of each contribution.
            measured: result of `measure`.
        """

    def prepare(self, commit: CommitRecord, recording: Recording | None) -> Prepared:
        """Compute the next version. Merge thread.

        Args:
            commit: record of the version.
            recording: also store the payloads of the merge with this; None: they are not stored.

        Raises:
            NonFiniteError: it is not finite.
            StorageError: the shard's disk has failed.
        """

    def deciding(self) -> AbstractContextManager[object]:
        """Return a context for `prepare`, the write to the run's log, and `decided`. Merge thread."""

    def decided(self, commit: CommitRecord) -> None:
        """Note that the run's log has this commit. Merge thread."""

    def install(self, commit: CommitRecord, prepared: Prepared) -> None:
        """Make a decided version the current one, so that learners can fetch it."""

    def drop(self, action: actions.DropPayload) -> None:
        """Drop a payload that is no longer needed. Loop thread."""

    def regenerate(self, generation: int) -> None:
        """Begin a new generation, see `AnchorStore.regenerate`. Loop thread."""


@dataclass(frozen=True, slots=True)
class _Merged:
    """An outer gradient, bfloat16 (P,), the number of its round, and the payloads that it was merged from."""

    round: int
    outer_gradient: Tensor
    payloads: tuple[Tensor, ...]


class OwnShard:
    """A `Shard` in this process.

    Args:
        desk: payloads of its contributions.
        recorder: stores start values and payloads for a replay, if it is asked to.

    Attributes:
        anchors: anchors of its fragments; None before the run has start values.
    """

    def __init__(self, desk: Payloads, recorder: Recorder) -> None:
        self._desk = desk
        self.recorder = recorder
        self._merged: dict[int, _Merged] = {}
        self.anchors: AnchorStore | None = None

    @property
    def store(self) -> AnchorStore:
        """The anchors of a run that has start values."""
        assert self.anchors is not None, "the run has no start values yet"
        return self.anchors

    def job(self, action: actions.Merge) -> MergeJob:
        """See `Shard`."""
        wanted = [(c.session, c.ready.seq) for c in (*action.contributions, *action.on_trial)]
        return MergeJob(action, self._desk.payloads(action.fragment, wanted))

    def measure(self, job: MergeJob) -> Measured:
        """See `Shard`."""
        return self.store.measure(job.action.fragment, job.payloads)

    def merge(self, job: MergeJob, max_norms: Sequence[float], measured: Measured) -> Outcome:
        """See `Shard`."""
        p, shares, number = job.action.fragment, job.action.shares, job.action.round
        return self.merge_payloads(p, job.payloads, shares, max_norms=max_norms, measured=measured, number=number)

    def merge_payloads(
        self,
        p: int,
        payloads: Sequence[Tensor],
        shares: Sequence[float],
        *,
        max_norms: Sequence[float],
        measured: Measured,
        number: int,
    ) -> Outcome:
        """Merge the first of these payloads, one for each share, in the round of this number."""
        num = len(shares)
        values_P, report = self.store.merge(p, payloads[:num], shares, max_norms, measured.only(num))
        self._merged[p] = _Merged(number, values_P, tuple(payloads[:num]))
        return Outcome(report, all_finite(values_P))

    def forget_gradients(self) -> None:
        """Drop the outer gradients of all merges."""
        self._merged.clear()

    def gradient(self, commit: CommitRecord) -> Tensor:
        """Return the outer gradient of a commit's round.

        Raises:
            TransportError: there is none.
        """
        merged = self._merged.get(commit.fragment)
        if merged is None or merged.round != commit.round:
            raise TransportError(f"round {commit.round} of fragment {commit.fragment} was not merged here")
        return merged.outer_gradient

    def prepare(self, commit: CommitRecord, recording: Recording | None) -> Prepared:
        """See `Shard`."""
        values_P = self.gradient(commit)
        payloads = self._merged.pop(commit.fragment).payloads
        anchor = self.store.next_state(commit.fragment, values_P, work=commit.work)
        if recording is not None:
            limits = floats(recording.max_norms)
            about = {"record": recording.record, "sessions": recording.sessions, "max_norms": limits}
            self.recorder.keep(Recorded(payloads=payloads, **about))
        return Prepared(self.store.outer_lr(anchor), gradient=bytes_of(values_P), anchor=anchor)

    def deciding(self) -> AbstractContextManager[object]:
        """See `Shard`."""
        return nullcontext()

    def decided(self, commit: CommitRecord) -> None:
        """See `Shard`."""

    def install(self, commit: CommitRecord, prepared: Prepared) -> None:
        """See `Shard`."""
        assert prepared.anchor is not None
        self._desk.note_merged(commit)
        self.store.install(commit.fragment, prepared.anchor)

    def drop(self, action: actions.DropPayload) -> None:
        """See `Shard`."""
        self._desk.drop(action.session, action.fragment, action.seq)

    def regenerate(self, generation: int) -> None:
        """See `Shard`."""
        if self.anchors is not None:
            self.anchors.regenerate(generation)
