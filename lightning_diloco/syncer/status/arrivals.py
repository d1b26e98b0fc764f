"""Tells when the standby or a shard comes or goes.

The loop thread calls `look` at each tick, because only this thread writes to the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_diloco.syncer.shards.remote import RemoteShard
from lightning_diloco.syncer.standby.replica import Replica

Tell = Callable[[str, dict[str, object]], object]


class Arrivals:
    """Tells which of the other processes of a syncer have come or gone.

    Args:
        replica: the standby.
        shards: shards in other processes; all are attached.
        tell: called with the name of an event and its fields.
    """

    def __init__(self, replica: Replica, shards: Sequence[RemoteShard], tell: Tell) -> None:
        self._replica, self._shards, self._tell = replica, shards, tell
        self._standby = replica.address
        self._away = set[int]()

    def look(self) -> None:
        """Tell what has changed since the last call."""
        before, self._standby = self._standby, self._replica.address
        if self._standby != before:
            if before is not None:
                self._tell("standby lost", {"standby": before})
            if self._standby is not None:
                self._tell("standby joined", {"standby": self._standby})
        away = {shard.part[0] for shard in self._shards if not shard.is_attached}
        for k in sorted(away ^ self._away):
            self._tell("shard away" if k in away else "shard back", {"shard": k})
        self._away = away
