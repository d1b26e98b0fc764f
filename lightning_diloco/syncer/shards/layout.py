"""The files and addresses of a run's shards on the syncer's machine.

RUN_DIR/syncer/num_shards     number of shards, if there are several
RUN_DIR/syncer/shards/<k>/    log and snapshots of shard k, and its join file
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightning_diloco.storage.files import make_directory, write_whole
from lightning_diloco.transport.address import (
    JoinAddress,
    join_host_port,
    read_join_file,
    split_host_port,
    write_join_file,
)

NO_PORT = 1  # of a shard that has not listened yet


def directory_of(run_dir: Path, k: int) -> Path:
    """Return the directory of a shard."""
    return run_dir / "syncer" / "shards" / str(k)


def holds_run(run_dir: Path) -> bool:
    """Return whether this directory has the log of a run."""
    return (run_dir / "syncer" / "log").exists()


def num_shards_of(run_dir: Path) -> int:
    """Return the number of shards of the run in this directory; 1 if there is no run."""
    file = run_dir / "syncer" / "num_shards"
    return int(file.read_text()) if file.exists() else 1


def write_num_shards(folder: Path, num_shards: int) -> None:
    """Write the number of shards, durably, to RUN_DIR/syncer, or to new files that will replace it."""
    write_whole(folder / "num_shards", f"{num_shards}\n".encode())


def listen_of(run_dir: Path, k: int, listen: str) -> str:
    """Return `host:port` for a shard: its last port, which learners still dial, else the syncer's port plus k.

    Args:
        run_dir: RUN_DIR.
        k: number of the shard.
        listen: `host:port` of the syncer; port 0 for any free port.
    """
    host, port = split_host_port(listen)
    join = directory_of(run_dir, k) / "join"
    last = read_join_file(join).port if join.exists() else NO_PORT
    if last == NO_PORT:
        return join_host_port(host, port + k if port else 0)
    return join_host_port(host, last)


def tell_token(run_dir: Path, k: int, address: JoinAddress) -> None:
    """Write the run's token to the join file of a shard, which its server follows."""
    join = directory_of(run_dir, k) / "join"
    make_directory(join.parent)
    known = read_join_file(join) if join.exists() else replace(address, port=NO_PORT, standby=None)
    told = replace(known, run=address.run, token=address.token, fingerprint=address.fingerprint)
    if told != known or not join.exists():
        write_join_file(join, told)
