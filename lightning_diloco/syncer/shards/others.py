"""The other shards of a syncer: processes that it starts on its machine, or that the user starts on others."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_diloco.syncer.front import Front
from lightning_diloco.syncer.gated_handler import GatedHandler
from lightning_diloco.syncer.options import SyncerOptions
from lightning_diloco.syncer.shards.elsewhere import Elsewhere
from lightning_diloco.syncer.shards.layout import tell_token
from lightning_diloco.syncer.shards.process import ShardProcess
from lightning_diloco.syncer.shards.remote import RemoteShard
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.transport.identity import ServerIdentity


class OtherShards:
    """Shards 1, 2, ... of a syncer.

    Attributes:
        shards: the shards, as the syncer sees them.
    """

    def __init__(self) -> None:
        self._processes: list[ShardProcess] = []
        self._has_started = False
        self.shards: Sequence[RemoteShard] = ()

    def prepare(
        self, options: SyncerOptions, num_shards: int, front: Front, identity: ServerIdentity, door: GatedHandler
    ) -> None:
        """Prepare to start the processes, or to receive reports of those that the user starts.

        Args:
            options: options of the syncer.
            num_shards: number of shards, including the syncer.
            front: its server.
            identity: certificate of the run.
            door: receives the addresses of shards on other machines.
        """
        key = Invitation.of(front.address, identity).key
        if options.shards_elsewhere:
            elsewhere = Elsewhere(num_shards, identity, address=lambda: front.address, key=key)
            door.shards, self.shards = elsewhere.on_get, elsewhere.shards
            return
        for k in range(1, num_shards):
            tell_token(options.run_dir, k, front.address)
            self._processes.append(ShardProcess(options.run_dir, (k, num_shards), options.listen, key))
        self.shards = [process.shard for process in self._processes]

    def start(self) -> None:
        """Start the processes, unless they have been started."""
        if not self._has_started:
            self._has_started = True
            for process in self._processes:
                process.start()

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.stop()
