"""The anchors of a stopped run, from the files of all its shards on this machine."""

from __future__ import annotations

import time
from pathlib import Path

from lightning_diloco.errors import ConfigError, StorageError
from lightning_diloco.manifest import plan_of
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.syncer.anchors import AnchorStore, fragments_of
from lightning_diloco.syncer.shards.layout import directory_of, num_shards_of
from lightning_diloco.syncer.shards.store import ShardStore
from lightning_diloco.syncer.store import SyncerStore


def read_run(run_dir: Path) -> tuple[SyncerState, AnchorStore | None]:
    """Return the state machine and the anchors of a stopped run, as a restarted syncer and its shards find them.

    Returns:
        State machine, and anchors of all fragments; None if the run has no start values yet.

    Raises:
        StorageError: a syncer works in the directory.
        CorruptLogError: the files are damaged, or not all of one moment.
    """
    num_shards = num_shards_of(run_dir)
    durable = SyncerStore(run_dir, num_shards=num_shards)
    try:
        state = SyncerState(run=run_dir.name)
        own = durable.restore(state, time.monotonic())
        if own is None or state.manifest is None or num_shards == 1:
            return state, own
        whole = AnchorStore(*plan_of(state.manifest))
        whole.include(own)
        versions = {p: f.version for p, f in enumerate(state.rounds.fragments)}
        for k in range(1, num_shards):
            whole.include(_read_shard(run_dir, (k, num_shards), versions))
        return state, whole
    finally:
        durable.close()


def _read_shard(run_dir: Path, part: tuple[int, int], versions: dict[int, int]) -> AnchorStore:
    shard = ShardStore(directory_of(run_dir, part[0]), part)
    try:
        if shard.anchors is None:
            raise StorageError(f"{directory_of(run_dir, part[0])} has no values; restore the files of this shard")
        shard.settle({p: versions[p] for p in fragments_of(part, len(versions))})
        return shard.anchors
    finally:
        shard.close()


def refuse_shards(run_dir: Path, what: str) -> None:
    """Raise `ConfigError` if the run has shards.

    Args:
        run_dir: RUN_DIR.
        what: what cannot be done with shards yet.
    """
    if (num_shards := num_shards_of(run_dir)) > 1:
        raise ConfigError(
            f"{what}: the run in {run_dir} has {num_shards} shards; this works only without shards so far"
        )
