"""The files of a stopped run and of all its shards, on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_diloco.errors import StorageError
from lightning_diloco.manifest import plan_of
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.syncer.anchors import AnchorStore, fragments_of
from lightning_diloco.syncer.shards.layout import directory_of, num_shards_of
from lightning_diloco.syncer.shards.store import ShardStore
from lightning_diloco.syncer.store import SyncerStore


@contextlib.contextmanager
def opened_run(run_dir: Path) -> Iterator[tuple[SyncerState, AnchorStore | None, SyncerStore]]:
    """Restore a stopped run as a restarted syncer and its shards do; no syncer can start during the block.

    Yields:
        State machine; anchors of all fragments, None if the run has no start values yet; the syncer's files.

    Raises:
        InUseError: a syncer works in the directory, or another command reads it.
        CorruptLogError: the files are damaged, or not all of one moment.
    """
    num_shards = num_shards_of(run_dir)
    durable = SyncerStore(run_dir, num_shards=num_shards)
    try:
        state = SyncerState(run=run_dir.name)
        whole = durable.restore(state, time.monotonic())
        if whole is not None and state.manifest is not None and num_shards > 1:
            own, whole = whole, AnchorStore(*plan_of(state.manifest))
            whole.include(own)
            for k in range(1, num_shards):
                whole.include(read_shard(run_dir, (k, num_shards), state))
        yield state, whole, durable
    finally:
        durable.close()


def read_run(run_dir: Path) -> tuple[SyncerState, AnchorStore | None]:
    """Return state machine and anchors of a stopped run; see `opened_run`."""
    with opened_run(run_dir) as (state, whole, _):
        return state, whole


def read_shard(run_dir: Path, part: tuple[int, int], state: SyncerState) -> AnchorStore:
    """Return the anchors of a shard at the versions that the syncer has decided.

    Args:
        run_dir: RUN_DIR.
        part: (shard, number of shards).
        state: the state machine of the run.

    Raises:
        StorageError: the shard has no files here.
        CorruptLogError: the files are damaged, or not of the same moment.
    """
    shard = ShardStore(directory_of(run_dir, part[0]), part)
    try:
        if shard.anchors is None:
            raise no_files(run_dir, part[0])
        fragments = state.rounds.fragments
        shard.settle({p: fragments[p].version for p in fragments_of(part, len(fragments))})
        if state.rounds.generation != shard.generation:  # it was away when this generation began
            shard.regenerate(state.rounds.generation)
        return shard.anchors
    finally:
        shard.close()


def no_files(run_dir: Path, k: int) -> StorageError:
    """Return the error for a shard whose files are not here."""
    directory = directory_of(run_dir, k)
    return StorageError(
        f"{directory} has no values of shard {k}; restore its files, or stop the shard and copy them from its machine"
    )
