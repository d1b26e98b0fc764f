"""The requests of a syncer to a shard, and of a shard on another machine to its syncer.

A request is in the header of a download: {"what": SHARD, "key", "nonce", "request"}. The key is that of a standby. The
nonce is that of the last `Attach`; a shard refuses the requests of a syncer that is not attached any more.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable

from lightning_diloco.protocol import codec
from lightning_diloco.protocol.codec import Json, Tagged, Value
from lightning_diloco.protocol.limits import Count, Finite, Rate, Text
from lightning_diloco.protocol.syncer.records import CommitRecord

SHARD = "shard"
Number = float | Text  # "inf" and "nan", which JSON has no numbers for


class Position(Value, frozen=True):
    """The version of a fragment that the run's log has decided, and its digest; "" if it is not known."""

    fragment: Count
    generation: Count
    version: Count
    digest: Text = ""


class Admitted(Value, frozen=True):
    """The sessions that may upload.

    Args:
        sessions: sessions that take part.
        seeder: session and number of the seed lease.
    """

    sessions: tuple[Text, ...] = ()
    seeder: tuple[Text, Count] | None = None


class Attach(Tagged, frozen=True):
    """Begin to work for this syncer, at these positions. All payloads are dropped.

    The answer is {"digests"}: the digest of each position.

    Args:
        nonce: nonce of the next requests, and of the polls for events.
        run: run id.
        shard, num_shards: what this shard must be.
        secret: secret of the run's proofs.
        positions: all fragments of this shard; None if the run has no start values.
        merged: merged contributions, see `Payloads.remember_merged`.
        admitted: who may upload.
        following: the shard does not follow under this name any more; see `Follow`.
    """

    nonce: Text
    run: Text
    shard: Count
    num_shards: Count
    secret: Text
    positions: tuple[Position, ...] | None
    merged: tuple[tuple[Text, Count, Count, Count, Finite], ...]
    admitted: Admitted
    following: Text = ""


class Decided(Value, frozen=True):
    """The log of a standby has this version."""

    fragment: Count
    version: Count


class Follow(Tagged, frozen=True):
    """Copy records from the primary's shard with the same number, for a standby. No syncer is attached any more.

    The answer is {"lsn", "has_all", "undecided"}: the last record on disk, null if the shard must be copied first;
    whether the primary's shard had no later one; and how many versions are undecided.

    Args:
        shard, num_shards: what this shard must be.
        following: name of the standby's requests. After the standby has sent `Attach`, this name is refused.
        invitation: address and key of the primary's shard, with its secrets.
        wait_s: how long to wait for a record, if there is none.
        decided: versions that may be installed; the shard has their outer gradients.
    """

    shard: Count
    num_shards: Count
    following: Text
    invitation: Text
    wait_s: Rate
    decided: tuple[Decided, ...] = ()


class Admit(Tagged, frozen=True):
    """Only these sessions may upload from now on. `Drop` drops the payloads of others."""

    admitted: Admitted


class Drop(Tagged, frozen=True):
    """Drop a payload that is no longer needed."""

    session: Text
    fragment: Count
    seq: Count


class Measure(Tagged, frozen=True):
    """Return the dot products of contributions, given by session and seq: {"shape"} and float64 values."""

    fragment: Count
    payloads: tuple[tuple[Text, Count], ...]


class Merge(Tagged, frozen=True):
    """Merge the first of the contributions that were measured last. The answer is `Merged`."""

    fragment: Count
    round: Count
    shares: tuple[Finite, ...]
    max_norms: tuple[Number, ...]


class Merged(Value, frozen=True):
    """An `Outcome`."""

    norms: tuple[Number, ...]
    kept: tuple[Number, ...]
    cosines: tuple[Number, ...]
    merged_norm: Number
    is_finite: bool


class Recording(Value, frozen=True):
    """Data that is stored with the payloads of a merge, for a replay; see `contribution_archive.Recorded`."""

    record: Json
    sessions: tuple[Text, ...]
    max_norms: tuple[Number, ...]


class Prepare(Tagged, frozen=True):
    """Compute the next version and log it. The answer is {"digest", "lr", "lsn"}.

    Args:
        commit: record of the version, without leased data.
        recording: None: the payloads need not be stored.
    """

    commit: CommitRecord
    recording: Recording | None = None


class Install(Tagged, frozen=True):
    """Make a prepared version the current one."""

    commit: CommitRecord


class Regenerate(Tagged, frozen=True):
    """Begin a new generation."""

    generation: Count


class SizeOfSeed(Tagged, frozen=True):
    """Return {"num_values"}: how many start values have arrived; null until all of this shard's have."""

    session: Text
    lease: Count
    num_fragments: Count


class StoreSeed(Tagged, frozen=True):
    """Make the start values durable. The answer is {"digests"}.

    Args:
        manifest: the seeder's manifest.
        num_values: number of start values of all shards.
        is_recorded: whether to store the values for a replay, too.
    """

    session: Text
    lease: Count
    manifest: Json
    num_values: Count
    is_recorded: bool = False


class Figures(Tagged, frozen=True):
    """Return {"pid", "bytes_up", "bytes_down"}: this process, and payload bytes that it has received and sent."""


class Over(Tagged, frozen=True):
    """The run has finished: the process of the shard ends."""


class AskIdentity(Tagged, frozen=True):
    """A shard asks its syncer for the certificate of the run; the answer is the content of its file."""


class Listens(Tagged, frozen=True):
    """A shard reports to its syncer where it listens."""

    shard: Count
    num_shards: Count
    address: Text


Request = (
    Attach
    | Follow
    | Admit
    | Drop
    | Measure
    | Merge
    | Prepare
    | Install
    | Regenerate
    | SizeOfSeed
    | StoreSeed
    | Figures
    | Over
    | AskIdentity
    | Listens
)
_KINDS: dict[str, type[Request]] = {kind.__name__: kind for kind in typing.get_args(Request)}


def header(key: str, request: Request, nonce: str = "") -> Json:
    """Return the header of the download that makes a request."""
    return {"what": SHARD, "key": key, "nonce": nonce, "request": codec.dump(request)}


def decode(values: object) -> Request:
    """Return the request of a JSON object.

    Raises:
        CorruptMessageError: unknown kind, or wrong fields.
    """
    return codec.load_tagged(_KINDS, values, "a request to a shard")


def numbers(values: Iterable[float]) -> tuple[Number, ...]:
    """Return values as JSON can hold them."""
    return tuple(value if math.isfinite(value) else str(value) for value in values)


def floats(values: Iterable[Number]) -> tuple[float, ...]:
    """Return the values of `numbers`."""
    return tuple(map(float, values))
