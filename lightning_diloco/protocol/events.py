"""The events that the state machines handle. `FromTheSyncer` and `FromALearner` carry messages of the other side.

Events are dataclasses, not msgspec structs, because they never leave their process. Messages are checked when they are
decoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_diloco.protocol.data_ranges import Piece
from lightning_diloco.protocol.messages import FromLearner, FromSyncer, Mark, Ready, Reason

# ------------------------------------------------------------------------------------------------------- to a learner


@dataclass(frozen=True, slots=True)
class StepDone:
    """The training thread has completed an inner step.

    Args:
        step: inner steps completed by this process.
        tokens: the learner's token counter after the step.
        pieces: parts of the step's batches, by lease; empty if data is not leased.
    """

    step: int
    tokens: int
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class StepBegins:
    """The training thread of a learner with several ranks begins a step: promise the actions of the next boundary."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The training thread is at a boundary without a step, because the learner drains.

    Args:
        is_online: whether the syncer can be reached.
    """

    is_online: bool = True


@dataclass(frozen=True, slots=True)
class Evaluating:
    """The training thread begins or ends validation."""

    begins: bool


@dataclass(frozen=True, slots=True)
class StopRun:
    """The training thread asks to end the whole run."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The training thread makes no more steps: drain, then leave. If `drain` is False, leave at once.

    Args:
        within_s: how long to drain; None: as the learner is configured.
    """

    reason: Reason
    drain: bool = True
    within_s: float | None = None


@dataclass(frozen=True, slots=True)
class FromTheSyncer:
    """A control message from the syncer has arrived."""

    message: FromSyncer


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The syncer can be reached again. It may have lost messages of this session."""

    connection: int
    known: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The payload of a snapshot is encoded, so the fragment's anchor may change again."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The syncer has acknowledged the payload."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class UploadFailed:
    """An upload has failed. The payload may have arrived nevertheless."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class Staged:
    """An update was fetched and can land at a boundary.

    Args:
        merged_seq: seq of this learner's contribution that is part of the update, if any.
        kept: merged part of that contribution's values, 0..1; below 1 if the norm guard scaled it down.
        is_full: the update replaces the anchor; otherwise it is added to the anchor.
        proof: proof that the version was published.
    """

    fragment: int
    generation: int
    version: int
    merged_seq: int | None
    is_full: bool = False
    kept: float = 1.0
    proof: str = ""


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A fetch has failed. The machine tries again."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Some time has passed.

    Args:
        heard: at the syncer, by session, the time of its last bulk call since the last tick. A bulk call shows that the
            session is alive, but causes no event.
    """

    heard: dict[str, float] = field(default_factory=dict)


LearnerEvent = (
    StepDone
    | StepBegins
    | Pause
    | Evaluating
    | StopRun
    | Finish
    | FromTheSyncer
    | Reconnected
    | Encoded
    | Uploaded
    | UploadFailed
    | Staged
    | FetchFailed
    | Tick
)

# ------------------------------------------------------------------------------------------------------ to the syncer


@dataclass(frozen=True, slots=True)
class FromALearner:
    """A control message has arrived from the process that owns this session."""

    session: str
    message: FromLearner


@dataclass(frozen=True, slots=True)
class PayloadReceived:
    """A whole payload has arrived. `error` describes what is wrong with its values, if anything."""

    session: str
    ready: Ready
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SeedStored:
    """The seeder's values are durable, or `error` is set; if `is_refused`, another attempt would fail too."""

    lease: int
    digests: tuple[str, ...]
    error: str | None = None
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of comparing one contribution with the others.

    Args:
        odd: what is wrong with it, if anything.
        is_refused: it must not be merged.
        likeness: median of its cosines with the other contributions of the round, -1..1; None if there are fewer than
            two others.
        is_telling: it was compared with at least two other learners, and nothing is wrong with it.
    """

    odd: str | None
    is_refused: bool = False
    likeness: float | None = None
    is_telling: bool = False


@dataclass(frozen=True, slots=True)
class Merged:
    """The outer gradient of a round is computed. No state has changed yet.

    If a verdict refuses contributions, there is no outer gradient, and the round is merged again without them.

    Args:
        kept: merged part of a contribution's values, by session; holds only contributions that were scaled down to a
            usual norm.
        verdicts: verdicts by session.
    """

    fragment: int
    round: int
    kept: dict[str, float] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit is durable and applied."""

    fragment: int
    round: int
    digest: str


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """A commit could not be written to disk. No state has changed."""

    fragment: int
    round: int
    error: str


@dataclass(frozen=True, slots=True)
class PayloadsLost:
    """A shard was restarted: the payloads of these fragments that had arrived are gone."""

    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoodStill:
    """The syncer's process was suspended for `for_s` seconds and could not receive messages."""

    for_s: float


SyncerEvent = (
    FromALearner | PayloadReceived | SeedStored | Merged | Committed | CommitFailed | PayloadsLost | Tick | StoodStill
)
