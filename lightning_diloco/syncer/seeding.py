"""Makes the start values of a new run durable, in this process and in all shards.

1. The values of each fragment arrive at the process that holds the fragment. When all have arrived, the shards store
   theirs first, then this process. They count when the run's log says so; before, a restart drops them.
2. If a shard or a disk fails, the shards begin anew, and the state machine grants the seed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from lightning_diloco.errors import NonFiniteError, PlanMismatchError, ShardError, StorageError
from lightning_diloco.protocol import actions, codec, events
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.syncer.anchors import fragments_of
from lightning_diloco.syncer.payloads import Payloads
from lightning_diloco.syncer.shards.remote import RemoteShard
from lightning_diloco.syncer.shards.requests import StoreSeed
from lightning_diloco.syncer.shards.shard import OwnShard
from lightning_diloco.syncer.store import SyncerStore, seeded_store


class Seeding:
    """The start values of a run. Used by the loop thread.

    Args:
        durable: store of this process.
        desk: start values that have arrived here.
        own: shard of this process; gets its anchors.
        remote: shards in other processes.
        is_recorded: also store the start values for a replay.
    """

    def __init__(
        self,
        durable: SyncerStore,
        desk: Payloads,
        own: OwnShard,
        *,
        remote: Sequence[RemoteShard],
        is_recorded: bool,
    ) -> None:
        self._durable, self._desk, self._own, self._remote = durable, desk, own, remote
        self._is_recorded = is_recorded
        self._action: actions.StoreSeed | None = None

    def begin(self, action: actions.StoreSeed) -> None:
        """Store these start values when all have arrived."""
        self._action = action

    def attempt(self, state: SyncerState, stored: Callable[[events.SeedStored], object]) -> None:
        """Store the start values, if all have arrived.

        Args:
            state: the state machine.
            stored: called with the result, before a shard may attach again.
        """
        action = self._action
        if action is None:
            return
        if state.seed_grant != (action.session, action.lease):
            self._action = None  # another learner has the seed lease now
            return
        num_fragments = cast("int", action.manifest["num_fragments"])
        values = self._desk.seed(action.session, action.lease, fragments_of(self._durable.part, num_fragments))
        num_remote = self._num_remote(action, num_fragments)
        if values is None or num_remote is None:
            return
        self._action = None
        num_values = num_remote + sum(each.numel() for each in values.values())
        with contextlib.ExitStack() as deciding:
            for shard in self._remote:
                deciding.enter_context(shard.deciding())
            event = self._store(action, values, num_values, state)
            if event.error is not None:  # some shards may have stored their values
                for shard in self._remote:
                    shard.reattach()
            stored(event)

    def _num_remote(self, action: actions.StoreSeed, num_fragments: int) -> int | None:
        """Return the number of start values in other processes; None until all have arrived."""
        try:
            found = [shard.size_of_seed(action.session, action.lease, num_fragments) for shard in self._remote]
        except ShardError:
            return None
        return None if None in found else sum(num for num in found if num is not None)

    def _store(
        self, action: actions.StoreSeed, values: dict[int, Tensor], num_values: int, state: SyncerState
    ) -> events.SeedStored:
        digests: dict[int, str] = {}
        try:
            store = seeded_store(action.manifest, values, part=self._durable.part, num_values=num_values)
            if self._is_recorded:
                self._own.recorder.keep_seed(store)
            request = StoreSeed(action.session, action.lease, action.manifest, num_values, self._is_recorded)
            for shard in self._remote:
                digests |= shard.store_seed(request)
            self._durable.store_seed(codec.dump(state.saved()), action.manifest, store)
        except (StorageError, ShardError) as problem:  # the values are kept here; the seeder asks again
            return events.SeedStored(action.lease, (), str(problem))
        except (NonFiniteError, PlanMismatchError) as problem:
            self._desk.drop_seed()
            return events.SeedStored(action.lease, (), str(problem), is_refused=True)
        self._own.anchors = store
        digests |= dict(zip(store.mine, store.digests(), strict=True))
        self._desk.drop_seed()
        return events.SeedStored(action.lease, tuple(digests[p] for p in sorted(digests)))
