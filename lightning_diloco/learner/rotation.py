"""Changes of the syncer: the run gets a new token, the syncer moves to another machine, or its standby takes over.

1. `rotate` replaces the token in RUN_DIR/join. A running syncer notices this and accepts only the new token from then
   on.
2. A connection that can read the join file reads it after a failed call, and continues with the new token. Learners
   that cannot read it continue to train, but are refused until they are restarted with the new join string.
3. If the host or port in the file has changed, the connection continues there. The address that a learner was given may
   differ from the one in the file (a proxy or a forwarded port). It is used as long as the one in the file stays.
4. If nothing has answered yet, the two addresses are tried in turn: a learner that is started again may have been given
   the address from before the syncer moved.
5. If the run has a standby, and nothing has answered for ASK_AFTER_S, the connection dials the standby for STAY_S, then
   the syncer again, and so on (`protocol/syncer/succession.py`). A standby that refuses to serve does not count as an
   answer. A syncer that is reading its disk does. The standby is named in the join string, or in the answers of the
   syncer. A transfer that still runs on the old connection is given up. A learner that has had no answer yet and dials
   a standby dials the other one at once.

Source: our choice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from lightning_diloco.errors import ConfigError, RemoteError, RestoringError, StandbyError, TransportError
from lightning_diloco.process.threads import unless
from lightning_diloco.protocol.syncer.succession import ASK_AFTER_S
from lightning_diloco.transport.address import JoinAddress, new_token, read_join_file, write_join_file
from lightning_diloco.transport.base import Bulk, Connection, Json, Polled

T = TypeVar("T")

STAY_S = 10.0


def rotate(run_dir: Path) -> JoinAddress:
    """Give a run a new token, and return the new join address.

    Args:
        run_dir: RUN_DIR.

    Raises:
        ConfigError: the directory was never served.
    """
    join = run_dir / "join"
    address = replace(read_join_file(join), token=new_token())
    write_join_file(join, address)
    return address


def _address_in(join: Path | None, run: str) -> JoinAddress | None:
    """Return the address in the join file; None if the file has no address of this run."""
    if join is None or not join.exists():
        return None
    try:
        known = read_join_file(join)
    except ConfigError:
        return None
    return known if known.run == run else None


class RedialingConnection:
    """Implements `Connection` on top of a connection that is replaced when the join file changes.

    Args:
        connect: makes a connection.
        address: address of the run.
        join: join file, if this machine can read it; None: the address never changes.

    Attributes:
        moved_to: `host:port` of the syncer that is dialled now, if another one was dialled before; else None.
    """

    def __init__(self, connect: Callable[[JoinAddress], Connection], address: JoinAddress, join: Path | None) -> None:
        self._connect, self._join = connect, join
        self._given, self._address, self._written = address, address, _address_in(join, address.run)
        self.moved_to: str | None = None
        self._has_answered = False
        self._answered_s = self._dialled_s = time.monotonic()
        self._stay_s = 0.0
        if self._written is not None:
            self._address = replace(address, token=self._written.token, fingerprint=self._written.fingerprint)
        self._connection = connect(self._address)
        self._replacing = threading.Lock()

    def send(self, session: str, messages: Sequence[Json]) -> Json:
        address = self._address
        answer = self._call(lambda connection: connection.send(session, messages))
        standby = answer.get("standby")
        with self._replacing:
            if standby not in (None, address.standby) and self._address is address:
                self._dial(replace(address, standby=standby))
        return answer

    def poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        return self._call(lambda connection: connection.poll(session, cursor, wait_s))

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        return self._call(self._unless_left(lambda connection: connection.put(bulk, deadline_s=deadline_s)))

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        return self._call(self._unless_left(lambda connection: connection.get(header, deadline_s=deadline_s)))

    def status(self) -> Json:
        return self._call(lambda connection: connection.status())

    def close(self) -> None:
        self._connection.close()

    @property
    def address(self) -> JoinAddress:
        """The address that is dialled now."""
        return self._address

    def move_to(self, syncer: str) -> None:
        """Dial this syncer (`host:port`), if another one is dialled, which then counts as its standby."""
        with self._replacing:
            if syncer != self._address.host_port:
                self._dial(replace(self._address, standby=syncer).swapped())

    def _call(self, call: Callable[[Connection], T]) -> T:
        try:
            answer = call(self._connection)
        except RestoringError:
            self._answered_s = time.monotonic()
            self._follow()
            raise
        except RemoteError as error:
            self._follow()
            self._ask_other(at_once=isinstance(error, StandbyError) and not self._has_answered)
            raise
        self._has_answered, self._answered_s = True, time.monotonic()
        self._stay_s = 0.0
        return answer

    def _unless_left(self, call: Callable[[Connection], T]) -> Callable[[Connection], T]:
        """Make a long call end when the connection is replaced, if the run has a standby."""
        if self._address.standby is None:
            return call

        def wait(connection: Connection) -> T:
            answer = unless(lambda: self._connection is not connection, partial(call, connection))
            if answer is None:
                raise TransportError("the syncer does not answer any more; another address is tried; try again")
            return answer

        return wait

    def _ask_other(self, *, at_once: bool) -> None:
        """After a failed call, switch between the syncer and the standby if it is time."""
        with self._replacing:
            now_s = time.monotonic()
            is_time = now_s - self._answered_s >= ASK_AFTER_S and now_s - self._dialled_s >= self._stay_s
            if self._address.standby is None or not (is_time or at_once):
                return
            self._dialled_s, self._stay_s = now_s, STAY_S
            self._dial(self._address.swapped())

    def _dial(self, address: JoinAddress) -> None:
        if _place(address) != _place(self._address):
            self.moved_to = address.host_port
        old, self._address = self._connection, address
        self._connection = self._connect(address)
        old.close()

    def _follow(self) -> None:
        """After a failed call, make a new connection if the join file has changed, or if nothing has answered yet."""
        with self._replacing:
            now, before = _address_in(self._join, self._address.run), self._written
            if now is None:
                return
            if now != before:
                has_moved = before is not None and _place(now) != _place(before)
                dialled = now if has_moved else self._address
            elif not self._has_answered and _place(now) != _place(self._given):
                dialled = now if _place(self._address) == _place(self._given) else self._given
            else:
                return
            self._written = now
            standby = now.standby or self._address.standby if _place(dialled) == _place(now) else dialled.standby
            self._dial(replace(dialled, token=now.token, fingerprint=now.fingerprint, standby=standby))


def _place(address: JoinAddress) -> tuple[str, int]:
    return address.host, address.port
