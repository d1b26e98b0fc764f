"""The actions that the state machines return. The caller of `handle` carries them out in order.

Actions are dataclasses, not msgspec structs, because they never leave their process.
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
    """Snapshot this fragment on the training thread, then encode and upload it as `ready` on the link thread."""

    ready: Ready


@dataclass(frozen=True, slots=True)
class Upload:
    """Upload the encoded bytes of a contribution, or upload them again."""

    ready: Ready


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch and stage the update from version `have` to the newest version; if `adopt`, fetch the full values."""

    fragment: int
    generation: int
    have: int
    seq: int | None
    adopt: bool


@dataclass(frozen=True, slots=True)
class Land:
    """Land the staged update on the training thread."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the encoded bytes of this contribution."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Stop this learner with the exception class `error` of `errors.py`."""

    error: str
    text: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Show a warning to the user of this learner."""

    text: str


@dataclass(frozen=True, slots=True)
class SayHello:
    """Send one `Reconnected` event: this learner's versions prove that the syncer's disk was rolled back."""


@dataclass(frozen=True, slots=True)
class Left:
    """The syncer has recorded the leave. The machine returns no further actions."""

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
    """Append a record to the redo log. It is durable before the next action in the list is carried out."""

    values: Json


@dataclass(frozen=True, slots=True)
class Contribution:
    """One accepted contribution to a round.

    Args:
        session: session that sent the payload.
        learner, incarnation: learner id and incarnation of the session.
        ready: description of the contribution.
        steps: reported number of steps, limited to a plausible number (`protocol/syncer/claims.py`).
    """

    session: str
    learner: str
    incarnation: int
    ready: Ready
    steps: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Compute the outer gradient of these payloads, then send a `Merged` event.

    Args:
        shares: share of each contribution in the work of the fleet (`protocol/syncer/shares.py`).
        on_trial: contributions of learners in quarantine, which are only compared with the others.
    """

    fragment: int
    round: int
    contributions: tuple[Contribution, ...]
    shares: tuple[float, ...]
    on_trial: tuple[Contribution, ...] = ()


@dataclass(frozen=True, slots=True)
class Apply:
    """Append the commit record with the outer gradient, fsync, apply it, then send `Committed` or `CommitFailed`.

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
        """Header of the log record. Each access encodes it anew, with every lease of every contribution."""
        return encode(self.commit)

    @property
    def work(self) -> float:
        """Work in the round; see `CommitRecord`."""
        return self.commit.work


@dataclass(frozen=True, slots=True)
class DropPayload:
    """Free a payload that was merged, superseded, refused or fenced off."""

    session: str
    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class StoreSeed:
    """Store the manifest and, when all values have arrived, the seeder's values at version 0; send `SeedStored`."""

    session: str
    lease: int
    manifest: Json


@dataclass(frozen=True, slots=True)
class Note:
    """Write an event to the tape, for users.

    Args:
        at_s: time of the event on the machine's clock; set by the caller of `handle`.
    """

    event: str
    fields: Json = field(default_factory=dict)
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class End:
    """End the run and write the summary."""

    status: str


SyncerAction = Send | Record | Merge | Apply | DropPayload | StoreSeed | Note | End
