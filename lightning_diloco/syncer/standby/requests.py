"""The requests of a standby to its primary.

A request is in the header of a download: {"what": STANDBY, "key", "request"}.
"""

from __future__ import annotations

import typing

from lightning_diloco.protocol import codec
from lightning_diloco.protocol.codec import Tagged
from lightning_diloco.protocol.limits import Count, Rate, Text

STANDBY = "standby"


class AskListing(Tagged, frozen=True):
    """Ask for the files of the newest snapshot, {"lsn", "files"}. The lsn is null before the run has start values."""


class AskFile(Tagged, frozen=True):
    """Ask for a file of the run directory, from byte `start` on."""

    name: Text
    start: Count


class AskLog(Tagged, frozen=True):
    """Ask for the records of the log after this one; wait this long for a record if there is none."""

    after: Count
    wait_s: Rate


class HaveLog(Tagged, frozen=True):
    """Report that the standby at this `host:port` has all records up to this one on disk.

    The answer is {"counts", "is_over", "reign", "shards"}: whether the standby has all decisions that were announced,
    whether the run has ended, the primary's reign, and where its shards listen (`RemoteShard.place`).
    """

    lsn: Count
    address: Text


class TookOver(Tagged, frozen=True):
    """Report that the syncer at this `host:port` serves the run now, in this reign.

    Both syncers have the same records up to `lsn`.
    """

    address: Text
    reign: Count
    lsn: Count


Request = AskListing | AskFile | AskLog | HaveLog | TookOver
_KINDS: dict[str, type[Request]] = {kind.__name__: kind for kind in typing.get_args(Request)}


def decode(values: object) -> Request:
    """Return the request of a JSON object.

    Raises:
        CorruptMessageError: unknown kind, or wrong fields.
    """
    return codec.load_tagged(_KINDS, values, "a standby's request")
