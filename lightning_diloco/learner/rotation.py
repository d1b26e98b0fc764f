"""A run's token is replaced: the syncer takes the new one at once, and whoever can read RUN_DIR/join follows.

1. To rotate is to replace the join file. A running syncer sees that it names another token and serves with that; one
   that starts later reads it anyway. From then on the old token lets nobody in.
2. A connection that knows a join file looks into it when a call fails, and goes on with what it names. Learners that do
   not share the file with the syncer train on and are refused, until they are started with the new join string.

Source: our choice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from lightning_diloco.errors import ConfigError, RemoteError
from lightning_diloco.transport.address import JoinAddress, new_token, read_join_file, write_join_file
from lightning_diloco.transport.base import Bulk, Connection, Json, Polled

T = TypeVar("T")


def rotate(run_dir: Path) -> JoinAddress:
    """Give a run another token; returns how it is joined now.

    Args:
        run_dir: RUN_DIR.

    Raises:
        ConfigError: nothing was served from there yet.
    """
    join = run_dir / "join"
    address = replace(read_join_file(join), token=new_token())
    write_join_file(join, address)
    return address


def current(address: JoinAddress, join: Path | None) -> JoinAddress:
    """The same address, with the secrets that this join file names now, if it is of the same run."""
    if join is None or not join.exists():
        return address
    try:
        known = read_join_file(join)
    except ConfigError:
        return address
    return replace(address, token=known.token, fingerprint=known.fingerprint) if known.run == address.run else address


class Followed:
    """Implements `Connection` over one that is replaced when the join file names other secrets.

    Args:
        connect: makes a connection.
        address: of the run.
        join: its join file, if it is on this machine; None: the address stays as it is.
    """

    def __init__(self, connect: Callable[[JoinAddress], Connection], address: JoinAddress, join: Path | None) -> None:
        self._connect, self._join = connect, join
        self._address = current(address, join)
        self._connection = connect(self._address)
        self._replacing = threading.Lock()

    def send(self, session: str, messages: Sequence[Json]) -> Json:
        return self._call(lambda connection: connection.send(session, messages))

    def poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        return self._call(lambda connection: connection.poll(session, cursor, wait_s))

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        return self._call(lambda connection: connection.put(bulk, deadline_s=deadline_s))

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        return self._call(lambda connection: connection.get(header, deadline_s=deadline_s))

    def status(self) -> Json:
        return self._call(lambda connection: connection.status())

    def close(self) -> None:
        self._connection.close()

    def _call(self, call: Callable[[Connection], T]) -> T:
        try:
            return call(self._connection)
        except RemoteError:
            self._follow()
            raise

    def _follow(self) -> None:
        """The next call goes to whom the join file names; this one failed, whatever the reason."""
        with self._replacing:
            address = current(self._address, self._join)
            if address.join_string() != self._address.join_string():
                before, self._address = self._connection, address
                self._connection = self._connect(address)
                before.close()
