"""Messages of a syncer with a standby wait for the records before them; the syncer itself does not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_diloco.errors import ShardError
from lightning_diloco.protocol import actions, codec, messages
from lightning_diloco.protocol.syncer import records
from lightning_diloco.syncer.merge_worker import DurableCommit
from lightning_diloco.syncer.options import SyncerOptions
from lightning_diloco.syncer.service import SyncerService
from lightning_diloco.syncer.standby import announcer, replica
from lightning_diloco.syncer.standby.requests import STANDBY, HaveLog, TookOver
from lightning_diloco.syncer.store import SyncerStore

KEY = "key"


class Primary:
    """A service that records its messages, and a standby that reports its records."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.service = SyncerService(
            SyncerOptions(run_dir=run_dir), run="r", durable=SyncerStore(run_dir), standby_key=KEY
        )
        self.sent: list[int] = []
        self.changed = threading.Condition()
        monkeypatch.setattr(self.service._announcer, "_send", self.put)
        self.service._threads["commits"].start()
        self.service._threads["messages"].start()  # the test acts as the loop thread

    def put(self, session: str, message: dict[str, object]) -> None:
        with self.changed:
            self.sent.append(int(str(message["others_tokens"])))
            self.changed.notify_all()

    @property
    def lsn(self) -> int:
        return self.service._durable.log.durable_lsn

    def standby_has(self, lsn: int) -> None:
        request = codec.dump(HaveLog(lsn, "127.0.0.1:1"))
        self.service.on_get({"what": STANDBY, "key": KEY, "request": request, "mark": "1"})

    def decide(self, *records_and_messages: records.LogRecord | int) -> None:
        """Carry out the actions of one event."""
        self.service._do(
            [
                actions.Send("s", messages.RunIs(given, None))
                if isinstance(given, int)
                else actions.Record(records.encode(given))
                for given in records_and_messages
            ]
        )

    def wait_for(self, *sent: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.sent == list(sent), timeout=10.0), self.sent


@pytest.fixture
def primary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Primary]:
    found = Primary(tmp_path / "run", monkeypatch)
    yield found
    found.standby_has(found.lsn)
    if not found.service._is_stopping:
        found.service.stop()


def leased(number: int) -> records.SourceEnded:
    return records.SourceEnded(source=number, size=1)


def test_without_a_standby_messages_are_sent_at_once(primary: Primary) -> None:
    primary.decide(leased(0), 1, leased(1), 2)
    assert primary.sent == [1, 2]


def test_messages_wait_for_the_records_before_them_and_keep_their_order(primary: Primary) -> None:
    primary.standby_has(before := primary.lsn)
    primary.decide(1)
    primary.wait_for(1)
    primary.decide(leased(0), 2, leased(1), 3, 4)
    primary.decide(leased(2), 5)
    assert primary.lsn == before + 3, "all of them are on the primary's disk"
    assert primary.sent == [1]
    primary.standby_has(before + 1)
    primary.wait_for(1, 2)
    primary.standby_has(before + 3)
    primary.wait_for(1, 2, 3, 4, 5)


def test_a_message_does_not_wait_for_a_commit_that_was_written_after_it(primary: Primary) -> None:
    primary.standby_has(before := primary.lsn)
    lsn = primary.service._durable.write({"kind": "CommitRecord"}, b"long")
    commit = DurableCommit(lsn, None, None, None, (), None)  # type: ignore[arg-type]
    primary.service._announcer._install = primary.service._inbox.put  # a commit without values
    primary.service._announcer.commit(commit)
    primary.decide(1)
    primary.wait_for(1)
    assert primary.service._inbox.num_waiting == 0, "the commit waits"
    primary.decide(leased(0), 2)
    assert primary.sent == [1]
    primary.standby_has(before + 2)
    primary.wait_for(1, 2)
    assert primary.service._inbox.take()[1] is commit  # type: ignore[index]


def test_the_last_messages_of_the_loop_thread_are_sent(primary: Primary) -> None:
    primary.standby_has(primary.lsn)

    def loop() -> None:
        while primary.service._inbox.take() is not None:
            pass
        primary.decide(1, 2)

    primary.service._threads["loop"] = threading.Thread(target=loop)
    primary.service._threads["loop"].start()
    primary.service.stop()
    assert primary.sent == [1, 2]


def test_after_a_record_that_changes_the_fleet_nothing_is_decided_until_the_standby_has_it(primary: Primary) -> None:
    primary.standby_has(before := primary.lsn)
    thread = threading.Thread(target=primary.decide, args=(records.Released("l"), leased(0), 1), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert primary.lsn == before + 1
    primary.standby_has(before + 1)
    thread.join(10.0)
    assert not thread.is_alive()
    assert primary.lsn == before + 2
    assert primary.sent == []
    primary.standby_has(before + 2)
    primary.wait_for(1)


def test_a_bounded_number_of_messages_waits(primary: Primary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "MAX_HELD", 3)
    primary.standby_has(before := primary.lsn)
    primary.decide(leased(0), 1, 2, 3)
    thread = threading.Thread(target=primary.decide, args=(4,), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    primary.standby_has(before + 1)
    primary.wait_for(1, 2, 3, 4)
    thread.join(10.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("end", ["takeover", "stop"])
def test_a_commit_that_the_standby_lacks_is_not_installed(
    primary: Primary, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Otherwise a shard in another process would give learners a version that the new primary lacks."""
    monkeypatch.setattr(replica, "LAST_WAIT_S", 0.0)
    installed: list[DurableCommit] = []
    primary.service._announcer._install = installed.append
    primary.standby_has(primary.lsn)
    commits = []
    for _ in range(3):
        lsn = primary.service._durable.write({"kind": "CommitRecord"}, b"x")
        commits.append(DurableCommit(lsn, None, None, None, (), None))  # type: ignore[arg-type]
        primary.service._announcer.commit(commits[-1])
    primary.standby_has(commits[1].lsn)
    deadline_s = time.monotonic() + 10.0
    while len(installed) < 2:
        assert time.monotonic() < deadline_s
    if end == "takeover":
        request = codec.dump(TookOver("127.0.0.1:1", 1, commits[1].lsn))
        primary.service.on_get({"what": STANDBY, "key": KEY, "request": request, "mark": "2"})
    primary.service.abandon()
    assert installed == commits[:2]
    assert primary.service._announcer.has_withheld, "so no snapshot may say that it has this record"


def test_a_shard_is_attached_when_the_standby_has_what_it_gives_to_learners(
    primary: Primary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "LAST_WAIT_S", 0.0)
    primary.standby_has(primary.lsn)
    lsn = primary.service._durable.write({"kind": "CommitRecord"}, b"decided")
    said: list[object] = []
    thread = threading.Thread(target=lambda: said.append(primary.service._attachment((1, 2))))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    primary.standby_has(lsn)
    thread.join(10.0)
    assert len(said) == 1
    primary.service._durable.write({"kind": "CommitRecord"}, b"another")
    primary.service.abandon()
    with pytest.raises(ShardError, match="the standby lacks"):
        primary.service._attachment((1, 2))
