"""The number of shards of a run, which may change at each start. The fragments are then resharded.

The files of the new shards are written beside the old ones, and replace them when they are complete
(`replacement.py`). The new logs are empty, so a replay starts here. The anchors of the whole run must fit in memory.

Source: our choice.
"""

from __future__ import annotations

import logging
from pathlib import Path

from lightning_diloco.errors import ConfigError
from lightning_diloco.protocol import codec
from lightning_diloco.storage.files import make_directory
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.storage.snapshots import SnapshotStore
from lightning_diloco.syncer import replacement
from lightning_diloco.syncer.anchors import fragments_of
from lightning_diloco.syncer.shards.layout import directory_of, holds_run, num_shards_of, write_num_shards
from lightning_diloco.syncer.shards.whole import opened_run
from lightning_diloco.syncer.standby.replica import has_standby

log = logging.getLogger(__name__)

MAX_SHARDS = 64


def settle_num_shards(run_dir: Path, given: int | None) -> int:
    """Return the number of shards of a run that is about to be served; reshard a known run on request.

    Args:
        run_dir: RUN_DIR.
        given: number that the user asks for; None: that of the run, 1 for a new run.

    Raises:
        ConfigError: the number is out of range, or does not fit the run.
        StorageError, CorruptLogError: see `deal_anew`.
    """
    if given is not None and not 1 <= given <= MAX_SHARDS:
        raise ConfigError(f"--shards {given}: must be 1..{MAX_SHARDS}; each shard is a process with its own memory bus")
    known = num_shards_of(run_dir)
    if given is None or given == known:
        return known
    if holds_run(run_dir):
        deal_anew(run_dir, given)
    else:
        make_directory(run_dir / "syncer")
        write_num_shards(run_dir / "syncer", given)
    return given


def deal_anew(run_dir: Path, num_shards: int) -> None:
    """Change the number of shards of a run whose processes are stopped.

    Args:
        run_dir: RUN_DIR, with the files of all shards.
        num_shards: the new number.

    Raises:
        ConfigError: the run has fewer fragments.
        StorageError: a syncer works in the directory, the files of a shard are not here, or the disk failed.
        CorruptLogError: the files are damaged, or not all of one moment.
    """
    log.info("the run has %d shards; its fragments are dealt to %d", num_shards_of(run_dir), num_shards)
    with opened_run(run_dir) as (state, whole, durable):
        if has_standby(run_dir):
            raise ConfigError(
                f"--shards {num_shards}: the run in {run_dir} has a standby with {num_shards_of(run_dir)}; end the "
                "standby, and wait until the run continues without it"
            )
        if whole is not None and num_shards > len(whole.mine):
            raise ConfigError(
                f"--shards {num_shards}: the run in {run_dir} has {len(whole.mine)} fragments; each shard needs one"
            )
        # Above all old records: the shard of a standby that comes back must see that its place is gone.
        old = [_last_lsn(directory_of(run_dir, k)) for k in range(1, num_shards_of(run_dir))]
        after = max([durable.log.last_lsn, *old]) + 1
        copy = replacement.begin(run_dir)
        make_directory(copy / "shards")
        if whole is None or state.manifest is None:
            make_directory(copy / "snapshot")  # start values without a log record are sent again
        else:
            for k in range(num_shards):
                numbers, tensors = whole.freeze(fragments_of((k, num_shards), len(whole.mine)))
                about = {"machine": codec.dump(state.saved())} if k == 0 else {"part": [k, num_shards]}
                about |= {"manifest": state.manifest, "anchors": numbers}
                directory = copy if k == 0 else copy / "shards" / str(k)
                lsn = durable.log.last_lsn if k == 0 else after
                SnapshotStore(directory / "snapshot").write(lsn, about, tensors)
                replacement.begin_log(directory / "log", lsn + 1)
        write_num_shards(copy, num_shards)
        replacement.complete(run_dir)


def _last_lsn(directory: Path) -> int:
    """Return the last record of a shard's log."""
    redo_log = RedoLog(directory / "log")
    try:
        return redo_log.last_lsn
    finally:
        redo_log.close()
