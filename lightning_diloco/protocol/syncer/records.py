"""The records of the syncer's redo log, from which a restart restores the durable state.

1. The live machine changes its durable state only by applying a record. A restart applies the same records again.
2. Applying a record again changes nothing, because a snapshot may already include some of the records after it.
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
    """The syncer is about to store start values that were sent under this seed lease."""

    lease: Count


class Seeded(Tagged, frozen=True):
    """The run has a manifest, start values at version 0, and a secret that is never sent (`proofs.py`)."""

    lease: Count
    manifest: Json
    secret: str = ""


class Granted(Tagged, frozen=True):
    """A session has got an incarnation and a slot. It is not active yet."""

    session: str
    learner: str
    incarnation: Count
    slot: Count


class Forgotten(Tagged, frozen=True):
    """A session is removed before it took part: it was silent and its place is needed, or its seed was refused."""

    session: str


class Activated(Tagged, frozen=True):
    """A session takes part from now on and fences off older ones. `replaced` is the last report of the active one."""

    session: str
    replaced: Heard | None = None


class Merge(Value, frozen=True):
    """One contributor of a commit.

    Args:
        share: share of the fleet's work, which is the coefficient of its values (`shares.py`).
        kept: merged part of its values, 0..1; below 1 if its norm was far above the usual one. The same part of its
            tokens counts as merged.
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
    """A fragment has a new version. The payload of the record is the merged outer gradient, bfloat16.

    Args:
        work: work in the round; 1 is a round of the whole fleet with H steps per learner (`shares.py`).
        num_stepping: number of learners that were stepping when the round opened.
        before: digest of the version before this one; "" in logs of older versions of this package.
        shard_lsn: record of the outer gradient in the log of the fragment's shard, which a standby needs as well; 0 if
            it is the payload, and in logs of older versions of this package.
    """

    fragment: Count
    generation: Count
    version: Count
    round: Count
    work: Finite
    num_stepping: Count
    merges: tuple[Merge, ...]
    before: str = ""
    shard_lsn: Count = 0


class Decided(Tagged, frozen=True):
    """A contribution has a fate other than merged."""

    session: str
    fragment: Count
    seq: Count
    fate: Unmerged
    reason: str


class Quarantined(Tagged, frozen=True):
    """A learner is in quarantine: its contributions are not merged, for this reason (`conduct.py`)."""

    learner: str
    reason: str


class Released(Tagged, frozen=True):
    """A learner has left quarantine: its contributions are merged again."""

    learner: str


class Lapsed(Tagged, frozen=True):
    """The lease of a session has run out. `heard` is its last report."""

    session: str
    heard: Heard


class Returned(Tagged, frozen=True):
    """A lapsed session has returned."""

    session: str


class Departed(Tagged, frozen=True):
    """A session has left. `progress` is its last report."""

    session: str
    reason: Reason
    progress: Progress


class Regenerated(Tagged, frozen=True):
    """A new generation begins, because a rolled-back disk lost versions. All learners adopt its anchors in full."""

    generation: Count


class Catalogued(Tagged, frozen=True):
    """The run leases the ranges of this data."""

    catalogue: Catalogue


class SourceEnded(Tagged, frozen=True):
    """A source of unknown length has this many ranges."""

    source: Count
    size: Count


class RangesLeased(Tagged, frozen=True):
    """A session has got these leases. `drops`: its landing rule drops tokens."""

    session: str
    grants: tuple[Grant, ...]
    drops: bool


class RangesSettled(Tagged, frozen=True):
    """Some ranges of a session are done, and others go back to the pool."""

    session: str
    done: tuple[Count, ...]
    back: tuple[Count, ...]


LeaseRecord = Catalogued | SourceEnded | RangesLeased | RangesSettled


class Stopped(Tagged, frozen=True):
    """A learner has ended the run for all learners."""

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
    digests: tuple[dict[str, str], ...] = ()  # digests of the last versions, per fragment


_KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(LogRecord)}


def encode(record: LogRecord) -> Json:
    """Return a record as a JSON object, with its class name under "kind"."""
    return codec.dump(record)


def decode(values: Json) -> LogRecord:
    """Return the record of a JSON object; the inverse of `encode`.

    Raises:
        CorruptLogError: unknown kind, because another version of this package wrote the log.
    """
    kind = _KINDS.get(str(values.get("kind")))
    if kind is None:
        raise CorruptLogError(
            f"found log record kind {values.get('kind')!r}; known are {', '.join(_KINDS)}; "
            "restart with the version of lightning-diloco that wrote this run directory"
        )
    return typing.cast("LogRecord", codec.load(kind, values))
