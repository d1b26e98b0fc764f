"""What the machines want done. Actions of one `handle` are carried out in order.

They are dataclasses, not structs: they stay in their process, so nothing reads them from outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_diloco.protocol.codec import Json
from lightning_diloco.protocol.messages import FromLearner, FromSyncer, Ready
from lightning_diloco.protocol.syncer.records import CommitRecord, encode

# ------------------------------------------------------------------------------------------------------- by a learner


@dataclass(frozen=True, slots=True)
class Say:
    """Send a control message to the syncer."""

    message: FromLearner


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Training thread: snapshot this fragment; then encode and upload it as `ready` on the link thread."""

    ready: Ready


@dataclass(frozen=True, slots=True)
class Upload:
    """Upload the kept bytes (again)."""

    ready: Ready


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch and stage what leads from `have` to the newest version; in full if `adopt`."""

    fragment: int
    generation: int
    have: int
    seq: int | None
    adopt: bool


@dataclass(frozen=True, slots=True)
class Land:
    """Training thread: the staged update becomes current."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The kept bytes of this contribution are not needed any more."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Stop this learner with an error of `errors.<error>`."""

    error: str
    text: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell this learner's user."""

    text: str


@dataclass(frozen=True, slots=True)
class SayHello:
    """Answer with `Reconnected`, once: what this learner holds proves that the syncer's disk was rolled back."""


@dataclass(frozen=True, slots=True)
class Left:
    """The leave is on record; nothing more will be said."""

    is_last: bool


@dataclass(frozen=True, slots=True)
class Promise:
    """All ranks of this learner will land and snapshot these fragments at the next boundary."""

    land: tuple[int, ...]
    snapshot: tuple[int, ...]


LearnerAction = Promise | Say | Snapshot | Upload | Fetch | Land | Forget | Fail | Warn | SayHello | Left

# ------------------------------------------------------------------------------------------------------ by the syncer


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message to the process that owns this session."""

    session: str
    message: FromSyncer


@dataclass(frozen=True, slots=True)
class Record:
    """Append to the redo log; durable before anything later in the list is carried out."""

    values: Json


@dataclass(frozen=True, slots=True)
class Contribution:
    """One accepted contribution to a round.

    Args:
        session: whose payload it is.
        learner, incarnation: who that is.
        ready: its description.
        steps: that may be in it: those it says, or as many as it can have made since its last one.
    """

    session: str
    learner: str
    incarnation: int
    ready: Ready
    steps: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Compute the outer gradient of these payloads; answer with `Merged`.

    Args:
        shares: of each contribution in the work of the fleet (`protocol/syncer/shares.py`).
        on_trial: contributions of learners in quarantine, which are only compared with the others.
    """

    fragment: int
    round: int
    contributions: tuple[Contribution, ...]
    shares: tuple[float, ...]
    on_trial: tuple[Contribution, ...] = ()


@dataclass(frozen=True, slots=True)
class Apply:
    """Append the commit record with the merged outer gradient, fsync, then apply it; answer `Committed`/`CommitFailed`.

    Args:
        commit: the log record.
    """

    commit: CommitRecord

    @property
    def fragment(self) -> int:
        return self.commit.fragment

    @property
    def round(self) -> int:
        return self.commit.round

    @property
    def record(self) -> Json:
        """Header of the log record, encoded by whoever asks: it names every lease of every contribution."""
        return encode(self.commit)

    @property
    def work(self) -> float:
        """Of the round, see `CommitRecord`."""
        return self.commit.work


@dataclass(frozen=True, slots=True)
class DropPayload:
    """Free a payload: merged, superseded, refused or fenced off."""

    session: str
    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class StoreSeed:
    """Store the manifest and, once all have arrived, the seeder's values at version 0; answer with `SeedStored`."""

    session: str
    lease: int
    manifest: Json


@dataclass(frozen=True, slots=True)
class Note:
    """Something people may want to know; goes to the tape.

    Args:
        at_s: when it happened, by the clock that the machine is told; whoever carries it out sets this.
    """

    event: str
    fields: Json = field(default_factory=dict)
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class End:
    """The run is over: write the summary."""

    status: str


SyncerAction = Send | Record | Merge | Apply | DropPayload | StoreSeed | Note | End
