"""A shard of a standby copies the primary's shard with the same number, record by record.

1. DIR/copied shows that the log in DIR is a part of that shard's log, so that copying can continue.
2. Otherwise the shard copies the newest snapshot, and the log from there on. It keeps its own files until the copy is
   complete. So a shard whose syncer was the primary before copies everything again.
3. The outer gradient of a version comes before the syncer's decision about it. It stays undecided until the standby's
   own log has the decision, or the next gradient of the fragment comes.

Source: our choice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from lightning_diloco.errors import CorruptLogError
from lightning_diloco.storage.files import storage, sync_directory
from lightning_diloco.storage.log_frames import Record
from lightning_diloco.syncer import replacement
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.syncer.standby.source import Source

log = logging.getLogger(__name__)


def is_copied(directory: Path) -> bool:
    """Return whether the log in DIR is a part of the log of the primary's shard."""
    return (directory / replacement.COPIED).exists()


def no_copy_any_more(directory: Path) -> None:
    """Record, durably, that the log in DIR is independent from now on."""
    if is_copied(directory):
        with storage("remove", directory / replacement.COPIED):
            (directory / replacement.COPIED).unlink()
            sync_directory(directory)


class ShardCopy:
    """Copies from the primary's shard.

    Args:
        directory: DIR.
        connect: connects to the shard of an invitation.
    """

    def __init__(self, directory: Path, connect: Callable[[Invitation], Source] = Source) -> None:
        self._directory, self._connect = directory, connect
        self._invitation = ""
        self._source: Source | None = None

    def records_after(self, lsn: int, invitation: str, wait_s: float) -> list[Record]:
        """Return the next records of the primary's shard; see `Source.log_after`."""
        try:
            return self._connected(invitation).log_after(lsn, wait_s)
        except CorruptLogError as error:  # the primary's shard has dropped these records, or this is another history
            log.warning("copying the shard again: %s", error)
            no_copy_any_more(self._directory)
            return []

    def fetch(self, invitation: str) -> bool:
        """Copy snapshot and log to DIR/copy; return False if there are no start values yet."""
        source = self._connected(invitation)
        found = source.listing()
        if found["lsn"] is None:
            return False
        log.info("copying the shard, %d files", len(found["files"]))
        copy = replacement.begin(self._directory)
        for name in found["files"]:
            replacement.add(copy / name, source.file(name))
        replacement.begin_log(copy / "log", found["lsn"] + 1)
        replacement.add(copy / replacement.COPIED)
        return True

    def install(self) -> None:
        """Replace the files in DIR by those in DIR/copy. No process may use them."""
        replacement.complete(self._directory, replacement.OF_A_SHARD)

    def close(self) -> None:
        """Close the connection."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _connected(self, invitation: str) -> Source:
        if self._source is None or invitation != self._invitation:
            self.close()
            self._invitation, self._source = invitation, self._connect(Invitation.parse(invitation))
        return self._source
