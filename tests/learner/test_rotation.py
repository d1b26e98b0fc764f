"""A learner dials the standby if its syncer does not answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from lightning_diloco.errors import RestoringError, StandbyError, TransportError
from lightning_diloco.learner import rotation
from lightning_diloco.learner.rotation import STAY_S, RedialingConnection
from lightning_diloco.protocol.syncer.succession import ASK_AFTER_S
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Json

SYNCER, STANDBY = "10.0.0.1:1", "10.0.0.2:2"
ALONE = JoinAddress("10.0.0.1", 1, "run", "token", "0" * 64)
BOTH = JoinAddress("10.0.0.1", 1, "run", "token", "0" * 64, STANDBY)


class Net:
    """Two syncers, a clock, and the answer or error of each syncer for a call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.does: dict[str, Any] = {SYNCER: {}, STANDBY: StandbyError("no")}
        self.dialled: list[str] = []
        monkeypatch.setattr(rotation.time, "monotonic", lambda: self.now_s)

    def connect(self, address: JoinAddress) -> Any:
        return Dialled(self, address.host_port)

    def call(self, followed: RedialingConnection, for_s: float, step_s: float = 0.5) -> list[str]:
        """Make calls for this time; return the called syncers, without consecutive repetitions."""
        self.dialled.clear()
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            with suppress(TransportError):
                followed.send("session", [])
            self.now_s += step_s
        return [name for k, name in enumerate(self.dialled) if k == 0 or name != self.dialled[k - 1]]


class Dialled:
    def __init__(self, net: Net, where: str) -> None:
        self._net, self._where = net, where

    def send(self, session: str, messages: Sequence[Json]) -> Json:
        self._net.dialled.append(self._where)
        found = self._net.does[self._where]
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        pass


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    return Net(monkeypatch)


def test_a_syncer_that_answers_is_the_only_one_dialled(net: Net) -> None:
    assert net.call(RedialingConnection(net.connect, BOTH, None), 60.0) == [SYNCER]


def test_the_standby_is_dialled_after_a_silence_and_followed_if_it_serves(net: Net) -> None:
    followed = RedialingConnection(net.connect, BOTH, None)
    net.call(followed, 10.0)
    net.does[SYNCER] = TransportError("gone")
    assert net.call(followed, ASK_AFTER_S - 1.0) == [SYNCER]
    assert net.call(followed, 2.0) == [SYNCER, STANDBY]
    net.does[STANDBY] = {}
    assert net.call(followed, 60.0) == [STANDBY]
    net.does = {SYNCER: {}, STANDBY: TransportError("gone")}
    assert net.call(followed, ASK_AFTER_S + 1.0) == [STANDBY, SYNCER], "and back"


def test_both_syncers_are_dialled_in_turn_while_none_serves(net: Net) -> None:
    followed = RedialingConnection(net.connect, BOTH, None)
    net.call(followed, 1.0)
    net.does[SYNCER] = TransportError("gone")
    assert net.call(followed, ASK_AFTER_S + 2 * STAY_S + 1.0) == [SYNCER, STANDBY, SYNCER, STANDBY]


def test_a_new_learner_that_dials_the_standby_dials_the_other_one_at_once(net: Net) -> None:
    net.does = {SYNCER: StandbyError("no"), STANDBY: {}}
    assert net.call(RedialingConnection(net.connect, BOTH, None), 1.0) == [SYNCER, STANDBY]


def test_a_syncer_that_reads_its_disk_is_waited_for(net: Net) -> None:
    net.does[SYNCER] = RestoringError("reading")
    assert net.call(RedialingConnection(net.connect, BOTH, None), 60.0) == [SYNCER]


def test_the_address_of_the_standby_comes_from_an_answer(net: Net) -> None:
    followed = RedialingConnection(net.connect, ALONE, None)
    net.does[SYNCER] = TransportError("gone")
    assert net.call(followed, 60.0) == [SYNCER], "there is nobody else to ask"
    net.does[SYNCER] = {"standby": STANDBY}
    net.call(followed, 1.0)
    net.does[SYNCER] = TransportError("gone")
    assert net.call(followed, ASK_AFTER_S + 1.0) == [SYNCER, STANDBY]


def test_a_connection_moves_on_request_and_reports_its_address(net: Net) -> None:
    leader, follower = RedialingConnection(net.connect, BOTH, None), RedialingConnection(net.connect, ALONE, None)
    assert leader.moved_to is None
    net.does = {SYNCER: TransportError("gone"), STANDBY: {}}
    net.call(leader, ASK_AFTER_S + 1.0)
    assert leader.moved_to == STANDBY
    follower.move_to(STANDBY)
    assert net.call(follower, 1.0) == [STANDBY]
    net.does = {SYNCER: {}, STANDBY: TransportError("gone")}
    net.call(leader, ASK_AFTER_S + 1.0)
    assert leader.moved_to == SYNCER
    follower.move_to(SYNCER)
    assert net.call(follower, 1.0) == [SYNCER]
