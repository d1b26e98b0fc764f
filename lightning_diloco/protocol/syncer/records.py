"""What the syncer writes to its redo log: everything a restart must know, and nothing it may forget.

1. The live machine changes its durable state only by applying one of these; a restart applies the same ones again.
2. Applying a record again changes nothing: a snapshot may hold what the records after it say once more.
"""

from __future__ import annotations

import typing

from msgspec import field

from lightning_diloco.errors import CorruptLogError
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.codec import Json, Tagged, Value
from lightning_diloco.protocol.data_ranges import EMPTY, Catalogue, Grant, SavedLeases
from lightning_diloco.protocol.limits import Count, Finite
from lightning_diloco.protocol.messages import Fate, Progress, Ready, Reason, Unmerged
from lightning_diloco.protocol.syncer.ledger import Heard, SavedAccount
from lightning_diloco.protocol.syncer.roster import State


class Seeding(Tagged, frozen=True):
    """Start values are about to be stored under this lease."""

    lease: Count


class Seeded(Tagged, frozen=True):
    """The run has a manifest and start values at version 0, and a secret that never leaves the syncer (`proofs.py`)."""

    lease: Count
    manifest: Json
    secret: str = ""


class Granted(Tagged, frozen=True):
    """This session got this incarnation; it is not active yet."""

    session: str
    learner: str
    incarnation: Count
    slot: Count


class Forgotten(Tagged, frozen=True):
    """This session was granted something, fell silent before it took part, and others need its place."""

    session: str


class Activated(Tagged, frozen=True):
    """The incarnation takes part from now on, and fences off the older one, whose books end with what was heard."""

    session: str
    replaced: Heard | None = None


class Merge(Value, frozen=True):
    """One contributor of a commit.

    Args:
        share: of the fleet's work: the coefficient of its values (`shares.py`).
        kept: the part of its values that was merged; below 1 if its norm was far above what is usual. As large a part
            of its tokens counts as merged.
    """

    session: str
    ready: Ready
    share: Finite
    kept: Finite = 1.0

    @property
    def stop(self) -> int:
        """End of the merged range, which begins at `ready.start`."""
        return self.ready.stop_if(self.kept)


class CommitRecord(Tagged, frozen=True):
    """A fragment's next version; the record's payload is the merged outer gradient, bfloat16.

    Args:
        work: that went into it, in rounds of the whole fleet with H steps each; see `shares.py`.
        num_stepping: learners that were stepping when the round opened.
        before: digest of the version that it follows; "" in logs of older versions of this package.
    """

    fragment: Count
    generation: Count
    version: Count
    round: Count
    work: Finite
    num_stepping: Count
    merges: tuple[Merge, ...]
    before: str = ""


class Decided(Tagged, frozen=True):
    """A contribution that will not be merged."""

    session: str
    fragment: Count
    seq: Count
    fate: Unmerged
    reason: str


class Quarantined(Tagged, frozen=True):
    """What this learner sends is not merged, for this reason (`conduct.py`)."""

    learner: str
    reason: str


class Released(Tagged, frozen=True):
    """What this learner sends is merged again."""

    learner: str


class Lapsed(Tagged, frozen=True):
    """The lease ran out."""

    session: str
    heard: Heard


class Returned(Tagged, frozen=True):
    """A lapsed process is back."""

    session: str


class Departed(Tagged, frozen=True):
    """A leave, with the leaver's books."""

    session: str
    reason: Reason
    progress: Progress


class Regenerated(Tagged, frozen=True):
    """What learners held did not fit what was restored: everyone adopts in full."""

    generation: Count


class Catalogued(Tagged, frozen=True):
    """The data of the run are these."""

    catalogue: Catalogue


class SourceEnded(Tagged, frozen=True):
    """A source of unknown length has this many ranges."""

    source: Count
    size: Count


class RangesLeased(Tagged, frozen=True):
    """These ranges are this session's; its landing rule drops tokens, or not."""

    session: str
    grants: tuple[Grant, ...]
    drops: bool


class RangesSettled(Tagged, frozen=True):
    """Of what this session had leased, these are done, and these go back."""

    session: str
    done: tuple[Count, ...]
    back: tuple[Count, ...]


LeaseRecord = Catalogued | SourceEnded | RangesLeased | RangesSettled


class Stopped(Tagged, frozen=True):
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


class SavedSession(Value, frozen=True):
    """A session as plain values, for snapshots."""

    session: str
    learner: str
    incarnation: Count
    slot: Count
    state: State
    ending: Reason | None
    is_lapsed: bool
    step: Count
    tokens: Count
    fates: dict[str, tuple[Count, Fate, Count | None, str | None, Finite]]
    num_refused: Count = 0
    num_clipped: Count = 0


class SavedState(Value, frozen=True):
    """The syncer machine's durable state, for snapshots."""

    run: str
    manifest: Json | None
    lease: Count
    generation: Count
    next_round: Count
    versions: tuple[Count, ...]
    sessions: tuple[SavedSession, ...]
    accounts: tuple[SavedAccount, ...]
    num_joins: Count
    num_lapses: Count
    num_commits: Count
    num_contributors: Count
    num_stepping: Count
    leases: SavedLeases = EMPTY
    stopped: str | None = None
    quarantined: dict[str, str] = field(default_factory=dict)
    secret: str = ""
    digests: tuple[dict[str, str], ...] = ()  # of the last versions, per fragment


_KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(LogRecord)}


def encode(record: LogRecord) -> Json:
    """The record as a JSON object; its class name is under "kind"."""
    return codec.dump(record)


def decode(values: Json) -> LogRecord:
    """The inverse of `encode`.

    Raises:
        CorruptLogError: unknown kind (the log was written by another version of this package).
    """
    kind = _KINDS.get(str(values.get("kind")))
    if kind is None:
        raise CorruptLogError(
            f"found log record kind {values.get('kind')!r}; known are {', '.join(_KINDS)}; "
            "restart with the version of lightning-diloco that wrote this run directory"
        )
    return typing.cast("LogRecord", codec.load(kind, values))
