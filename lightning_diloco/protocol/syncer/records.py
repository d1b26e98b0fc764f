"""What the syncer writes to its redo log: everything a restart must know, and nothing it may forget.

1. The live machine changes its durable state only by applying one of these; a restart applies the same ones again.
2. Applying a record again changes nothing: a snapshot may hold what the records after it say once more.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field

from lightning_diloco.errors import CorruptLogError
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.codec import Json
from lightning_diloco.protocol.data_ranges import EMPTY, Catalogue, Grant, SavedLeases
from lightning_diloco.protocol.messages import Fate, Progress, Ready, Reason, Unmerged
from lightning_diloco.protocol.syncer.ledger import Heard, SavedAccount
from lightning_diloco.protocol.syncer.roster import State


@dataclass(frozen=True, slots=True)
class Seeding:
    """Start values are about to be stored under this lease."""

    lease: int


@dataclass(frozen=True, slots=True)
class Seeded:
    """The run has a manifest and start values at version 0, and a secret that never leaves the syncer (`proofs.py`)."""

    lease: int
    manifest: Json
    secret: str = ""


@dataclass(frozen=True, slots=True)
class Granted:
    """This session got this incarnation; it is not active yet."""

    session: str
    learner: str
    incarnation: int
    slot: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """This session was granted something, fell silent before it took part, and others need its place."""

    session: str


@dataclass(frozen=True, slots=True)
class Activated:
    """The incarnation takes part from now on, and fences off the older one, whose books end with what was heard."""

    session: str
    replaced: Heard | None = None


@dataclass(frozen=True, slots=True)
class Merge:
    """One contributor of a commit.

    Args:
        share: of the fleet's work: the coefficient of its values (`shares.py`).
        kept: the part of its values that was merged; below 1 if its norm was far above what is usual. As large a part
            of its tokens counts as merged.
    """

    session: str
    ready: Ready
    share: float
    kept: float = 1.0

    @property
    def stop(self) -> int:
        """End of the merged range, which begins at `ready.start`."""
        return self.ready.stop_if(self.kept)


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A fragment's next version; the record's payload is the merged outer gradient, bfloat16.

    Args:
        work: that went into it, in rounds of the whole fleet with H steps each; see `shares.py`.
        num_stepping: learners that were stepping when the round opened.
    """

    fragment: int
    generation: int
    version: int
    round: int
    work: float
    num_stepping: int
    merges: tuple[Merge, ...]


@dataclass(frozen=True, slots=True)
class Decided:
    """A contribution that will not be merged."""

    session: str
    fragment: int
    seq: int
    fate: Unmerged
    reason: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What this learner sends is not merged, for this reason (`conduct.py`)."""

    learner: str
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """What this learner sends is merged again."""

    learner: str


@dataclass(frozen=True, slots=True)
class Lapsed:
    """The lease ran out."""

    session: str
    heard: Heard


@dataclass(frozen=True, slots=True)
class Returned:
    """A lapsed process is back."""

    session: str


@dataclass(frozen=True, slots=True)
class Departed:
    """A leave, with the leaver's books."""

    session: str
    reason: Reason
    progress: Progress


@dataclass(frozen=True, slots=True)
class Regenerated:
    """What learners held did not fit what was restored: everyone adopts in full."""

    generation: int


@dataclass(frozen=True, slots=True)
class Catalogued:
    """The data of the run are these."""

    catalogue: Catalogue


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """A source of unknown length has this many ranges."""

    source: int
    size: int


@dataclass(frozen=True, slots=True)
class RangesLeased:
    """These ranges are this session's; its landing rule drops tokens, or not."""

    session: str
    grants: tuple[Grant, ...]
    drops: bool


@dataclass(frozen=True, slots=True)
class RangesSettled:
    """Of what this session had leased, these are done, and these go back."""

    session: str
    done: tuple[int, ...]
    back: tuple[int, ...]


LeaseRecord = Catalogued | SourceEnded | RangesLeased | RangesSettled


@dataclass(frozen=True, slots=True)
class Stopped:
    """A learner ended the run, for everybody."""

    reason: str


LogRecord = (
    Seeding
    | Seeded
    | Granted
    | Forgotten
    | Activated
    | CommitRecord
    | Decided
    | Quarantined
    | Released
    | Lapsed
    | Returned
    | Departed
    | Regenerated
    | Stopped
    | LeaseRecord
)


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A session as plain values, for snapshots."""

    session: str
    learner: str
    incarnation: int
    slot: int
    state: State
    ending: Reason | None
    is_lapsed: bool
    step: int
    tokens: int
    fates: dict[str, tuple[int, Fate, int | None, str | None, float]]
    num_refused: int = 0
    num_clipped: int = 0


@dataclass(frozen=True, slots=True)
class SavedState:
    """The syncer machine's durable state, for snapshots."""

    run: str
    manifest: Json | None
    lease: int
    generation: int
    next_round: int
    versions: tuple[int, ...]
    sessions: tuple[SavedSession, ...]
    accounts: tuple[SavedAccount, ...]
    num_joins: int
    num_lapses: int
    num_commits: int
    num_contributors: int
    num_stepping: int
    leases: SavedLeases = EMPTY
    stopped: str | None = None
    quarantined: dict[str, str] = field(default_factory=dict)
    secret: str = ""


_KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(LogRecord)}


def encode(record: LogRecord) -> Json:
    """The record as a JSON object; its class name is under "kind"."""
    return {"kind": type(record).__name__, **codec.dump(record)}


def decode(values: Json) -> LogRecord:
    """The inverse of `encode`.

    Raises:
        CorruptLogError: unknown kind (the log was written by another version of this package).
    """
    fields = dict(values)
    kind = _KINDS.get(str(fields.pop("kind", None)))
    if kind is None:
        raise CorruptLogError(
            f"found log record kind {values.get('kind')!r}; known are {', '.join(_KINDS)}; "
            "restart with the version of lightning-diloco that wrote this run directory"
        )
    return typing.cast("LogRecord", codec.load(kind, fields))
