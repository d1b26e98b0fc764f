"""What happened, for the machines. `FromTheSyncer` and `FromALearner` carry what the other side said.

They are dataclasses, not structs: they stay in their process, and what they carry was checked when it was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_diloco.protocol.data_ranges import Piece
from lightning_diloco.protocol.messages import FromLearner, FromSyncer, Mark, Ready, Reason

# ------------------------------------------------------------------------------------------------------- to a learner


@dataclass(frozen=True, slots=True)
class StepDone:
    """Training thread: an inner step was completed.

    Args:
        step: inner steps completed by this process.
        tokens: the learner's token counter after it.
        pieces: what of its batches was leased; nothing where data are not leased.
    """

    step: int
    tokens: int
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class StepBegins:
    """Training thread of a learner with several ranks: what the next boundary does is to be promised now."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Training thread, between steps: a boundary without a step (draining).

    Args:
        is_online: whether the syncer can be reached.
    """

    is_online: bool = True


@dataclass(frozen=True, slots=True)
class Evaluating:
    """Training thread: validation begins or ends."""

    begins: bool


@dataclass(frozen=True, slots=True)
class StopRun:
    """Training thread: the whole run is to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Training thread: no more steps will come; drain and leave. With drain False, leave at once.

    Args:
        within_s: how long to drain; None: as the learner was configured.
    """

    reason: Reason
    drain: bool = True
    within_s: float | None = None


@dataclass(frozen=True, slots=True)
class FromTheSyncer:
    """A control message arrived."""

    message: FromSyncer


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The syncer answers again and may have forgotten this session's messages."""

    connection: int
    known: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The payload of a snapshot exists; the fragment's anchor may change again."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The syncer acknowledged the payload."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class UploadFailed:
    """The payload may or may not have arrived."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class Staged:
    """An update was fetched and can land at a boundary.

    Args:
        merged_seq: my contribution that is part of this update, if any.
        kept: the part of its values that was merged, 0..1; below 1 if its norm was above the guard.
        is_full: the update replaces the anchor, rather than adding to it.
        proof: that the version was published.
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
    """An update could not be fetched; it is tried again."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Some time has passed.

    Args:
        heard: at the syncer, sessions that were heard from without an event since the last tick, and when.
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
    """A control message arrived from the process that owns this session."""

    session: str
    message: FromLearner


@dataclass(frozen=True, slots=True)
class PayloadReceived:
    """A whole payload arrived; `error` says what was wrong with its values, if anything."""

    session: str
    ready: Ready
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SeedStored:
    """The seeder's values are durable, or could not be stored: not yet, or never (`is_refused`)."""

    lease: int
    digests: tuple[str, ...]
    error: str | None = None
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one contribution looked like beside others.

    Args:
        odd: what is wrong with it, if anything.
        is_refused: it must not be merged.
        likeness: median of its cosines with the others' of the round, -1..1; None: there were fewer than two.
        is_telling: two others agree that nothing is wrong with it.
    """

    odd: str | None
    is_refused: bool = False
    likeness: float | None = None
    is_telling: bool = False


@dataclass(frozen=True, slots=True)
class Merged:
    """The outer gradient of a round was computed; nothing has changed yet.

    If contributions are refused, there is none: the round is merged again without them.

    Args:
        kept: by session, the part of a contribution's values that was merged, for those that were scaled down to a
            usual norm.
        verdicts: by session.
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
    """The disk did not take a commit; nothing has changed."""

    fragment: int
    round: int
    error: str


@dataclass(frozen=True, slots=True)
class StoodStill:
    """The syncer's process stood still for so long: it heard nobody, and nobody could reach it."""

    for_s: float


SyncerEvent = FromALearner | PayloadReceived | SeedStored | Merged | Committed | CommitFailed | Tick | StoodStill
