"""The announcements of a primary depend on the records on its standby's disk."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_diloco.errors import AuthError, ConfigError, CorruptLogError, CorruptMessageError
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.syncer import succession
from lightning_diloco.protocol.syncer.succession import Fleets
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.syncer.standby import replica as replica_module
from lightning_diloco.syncer.standby.reign import set_reign
from lightning_diloco.syncer.standby.replica import Replica
from lightning_diloco.syncer.standby.requests import AskFile, AskListing, AskLog, HaveLog, Request, TookOver

KEY, HERE, THERE = "key", "127.0.0.1:1", "127.0.0.1:2"


@pytest.fixture
def redo_log(tmp_path: Path) -> Iterator[RedoLog]:
    log = RedoLog(tmp_path / "syncer" / "log")
    yield log
    log.close()


@pytest.fixture
def replica(tmp_path: Path, redo_log: RedoLog) -> Replica:
    return Replica(tmp_path, redo_log, KEY, Fleets())


def ask(replica: Replica, request: Request) -> tuple[dict, bytes]:
    bulk = replica.on_get({"key": KEY, "request": codec.dump(request), "mark": str(time.monotonic_ns())})
    return bulk.header, bytes(bulk.payload)


def log_after(replica: Replica, lsn: int) -> bytes:
    return ask(replica, AskLog(lsn, 0.0))[1]


def have(replica: Replica, lsn: int, address: str = HERE) -> dict:
    return ask(replica, HaveLog(lsn, address))[0]


def write(log: RedoLog) -> int:
    lsn = log.append({"n": 1})
    log.sync()
    return lsn


def waiting(replica: Replica, lsn: int) -> threading.Thread:
    thread = threading.Thread(target=replica.wait, args=(lsn,), daemon=True)
    thread.start()
    return thread


def test_without_a_standby_nothing_waits(replica: Replica, redo_log: RedoLog) -> None:
    replica.wait(write(redo_log))
    assert replica.status() is None


def test_announcements_wait_for_a_standby_that_has_caught_up(replica: Replica, redo_log: RedoLog) -> None:
    write(redo_log)
    assert log_after(replica, 0), "the first record"
    assert not have(replica, 0)["counts"], "decisions before this may have been announced without it"
    assert replica.address is None
    assert log_after(replica, 1) == b""
    assert have(replica, 1)["counts"]
    assert replica.address == HERE
    lsn = write(redo_log)
    thread = waiting(replica, lsn)
    assert log_after(replica, 1)
    assert thread.is_alive(), "sent is not yet on its disk"
    assert (replica.status() or {})["records_behind"] == 1
    have(replica, lsn)
    thread.join(5.0)
    assert not thread.is_alive()
    assert replica.may_announce


@pytest.mark.seconds
def test_a_silent_standby_is_given_up_by_the_rule_and_only_then_another_one_is_accepted(
    replica: Replica, redo_log: RedoLog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    have(replica, 0)
    with pytest.raises(ConfigError, match=f"has a standby already, {HERE}"):
        have(replica, 0, THERE)
    thread = waiting(replica, write(redo_log))
    thread.join(0.3)
    assert thread.is_alive()
    monkeypatch.setattr(succession, "ALONE_S", 0.1)
    thread.join(5.0)
    assert not thread.is_alive()
    assert replica.address is None
    assert not (tmp_path / "syncer" / "standby.json").exists()
    have(replica, 1, THERE)
    assert replica.address == THERE


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("there_and_here", "may"),
    [
        (("abcd", "abcd"), False),
        (("abcd", "a"), False),  # the other learners have lapsed here, but not at the standby
        (("abcd", ""), False),
        (("a", "abcd"), False),  # the other learners have joined here, but not at the standby
        (("ab", "ab"), True),
        (("a", "a"), True),
    ],
)
def test_the_primary_continues_alone_with_half_of_each_fleet_that_the_standby_may_count(
    tmp_path: Path, redo_log: RedoLog, monkeypatch: pytest.MonkeyPatch, there_and_here: tuple[str, str], may: bool
) -> None:
    there, here = there_and_here
    monkeypatch.setattr(succession, "ALONE_S", 0.1)
    monkeypatch.setattr(succession, "BEFORE_S", 0.0)
    replica = Replica(tmp_path, redo_log, KEY, Fleets())
    replica.heard("a")
    have(replica, 0)
    replica.fleet_is(there)
    replica.fleet_changes_to(here, set(there) ^ set(here))
    replica.heard("a")
    thread = waiting(replica, write(redo_log))
    until_s = time.monotonic() + 0.6
    while time.monotonic() < until_s:
        replica.heard("a")
        thread.join(0.02)
    assert thread.is_alive() != may
    replica.end(is_over=False)


def test_a_standby_with_a_new_copy_or_another_history_has_to_catch_up_first(
    replica: Replica, redo_log: RedoLog
) -> None:
    have(replica, 0)
    for _ in range(3):
        write(redo_log)
    assert have(replica, 3)["counts"]
    assert not have(replica, 1)["counts"], "a new copy"
    assert not have(replica, 2)["counts"]
    assert have(replica, 3)["counts"]
    assert not have(replica, 9)["counts"], "another history"
    thread = waiting(replica, 3)
    thread.join(0.3)
    assert thread.is_alive()
    have(replica, 3)
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_standby_without_progress_counts_as_silent(replica: Replica, redo_log: RedoLog) -> None:
    have(replica, 0)
    write(redo_log)
    first_s = (replica.status() or {})["silent_s"]
    assert not have(replica, 0)["counts"]
    assert (replica.status() or {})["silent_s"] >= first_s
    have(replica, 1)
    assert (replica.status() or {})["silent_s"] < 0.1


def test_a_restarted_primary_waits_for_its_standby(replica: Replica, redo_log: RedoLog, tmp_path: Path) -> None:
    have(replica, 0)
    write(redo_log)
    again = Replica(tmp_path, redo_log, KEY, Fleets())
    assert (again.address, again.is_behind) == (HERE, True)
    assert not have(again, 0)["counts"]
    assert again.is_behind
    assert have(again, 1)["counts"]
    assert not again.is_behind


def test_after_a_takeover_nothing_is_announced(replica: Replica, redo_log: RedoLog) -> None:
    have(replica, 0)
    thread = waiting(replica, write(redo_log))
    ask(replica, TookOver(HERE, 1, 5))
    thread.join(5.0)
    assert not thread.is_alive()
    assert (replica.successor, replica.common_lsn, replica.may_announce) == (HERE, 5, False)


def test_a_syncer_with_a_later_takeover_is_not_replaced(redo_log: RedoLog, tmp_path: Path) -> None:
    set_reign(tmp_path, 2)
    replica = Replica(tmp_path, redo_log, KEY, Fleets())
    for number in (1, 2):
        ask(replica, TookOver(HERE, number, 5))
        assert replica.successor is None
    assert have(replica, 0)["reign"] == 2
    ask(replica, TookOver(HERE, 3, 5))
    assert replica.successor == HERE


@pytest.mark.parametrize("is_over", [True, False])
def test_a_stopping_syncer_announces_only_records_of_the_standby(
    replica: Replica, redo_log: RedoLog, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    monkeypatch.setattr(replica_module, "LAST_WAIT_S", 0.2)
    have(replica, 0)
    thread = waiting(replica, write(redo_log))
    while replica.status()["waits_s"] is None:  # type: ignore[index]
        time.sleep(0.001)
    replica.end(is_over=is_over)
    thread.join(5.0)
    assert not thread.is_alive()
    assert not replica.may_announce


def test_a_standby_with_all_records_receives_the_end_of_the_run(replica: Replica, redo_log: RedoLog) -> None:
    have(replica, 0)
    thread = threading.Thread(target=replica.end, kwargs={"is_over": True}, daemon=True)
    thread.start()
    while not have(replica, 0)["is_over"]:
        pass
    thread.join(5.0)
    assert not thread.is_alive()
    assert replica.may_announce


def test_files_are_listed_and_sent_from_any_byte(replica: Replica, tmp_path: Path) -> None:
    assert json.loads(ask(replica, AskListing())[1]) == {"lsn": None, "files": []}
    folder = tmp_path / "syncer" / "snapshot" / f"{7:020d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_bytes(b"abc")
    (folder.parent / f"{9:020d}.partial").mkdir()
    name = f"syncer/snapshot/{7:020d}/state.json"
    assert json.loads(ask(replica, AskListing())[1]) == {"lsn": 7, "files": [name]}
    assert ask(replica, AskFile(name, 1))[1] == b"bc"
    (folder / "empty").touch()
    assert ask(replica, AskFile(name.replace("state.json", "empty"), 0))[1] == b""


def test_a_file_that_is_cut_while_it_is_sent_does_not_end_the_process(replica: Replica, tmp_path: Path) -> None:
    """After a disk error, the tape is cut to its durable end; reading a mapped file would then raise SIGBUS."""
    tape = tmp_path / "tape" / "events.jsonl"
    tape.parent.mkdir()
    tape.write_bytes(b"x" * 50_000)
    request = codec.dump(AskFile("tape/events.jsonl", 10_000))
    bulk = replica.on_get({"key": KEY, "request": request, "mark": "1"})
    os.truncate(tape, 0)
    assert bytes(bulk.payload) == b"x" * 40_000


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "syncer/missing"])
def test_files_outside_of_the_run_are_not_sent(replica: Replica, tmp_path: Path, name: str) -> None:
    (tmp_path.parent / "secret").write_text("secret")
    with pytest.raises(CorruptLogError, match="no longer, a file of this run"):
        ask(replica, AskFile(name, 0))


def test_requests_without_the_key_are_refused(replica: Replica, redo_log: RedoLog, tmp_path: Path) -> None:
    for key in ("", "wrong", None):
        with pytest.raises(AuthError, match="key of the standby"):
            replica.on_get({"key": key, "request": {"kind": "AskListing"}})
    keyless = Replica(tmp_path, redo_log, "", Fleets())
    with pytest.raises(AuthError, match="key of the standby"):
        keyless.on_get({"key": "", "request": {"kind": "AskListing"}})


@pytest.mark.parametrize(
    "request_",
    [
        None,
        {},
        {"kind": "Else"},
        {"kind": "AskLog"},
        {"kind": "AskLog", "after": "x", "wait_s": 0.0},
        {"kind": "AskLog", "after": 0, "wait_s": float("nan")},
        {"kind": "AskLog", "after": -1, "wait_s": 0.0},
        {"kind": "HaveLog", "lsn": -1, "address": HERE},
        {"kind": "AskFile", "name": "tape", "start": "x"},
        {"kind": "AskFile", "name": "tape", "start": -1},
        {"kind": "TookOver"},
        {"kind": "TookOver", "address": HERE},
        {"kind": "TookOver", "address": HERE, "reign": 1},
    ],
)
def test_a_request_with_wrong_fields_is_refused(replica: Replica, request_: object) -> None:
    with pytest.raises(CorruptMessageError, match="same version"):
        replica.on_get({"key": KEY, "mark": "m", "request": request_})
    assert (replica.address, replica.successor) == (None, None)


@pytest.mark.parametrize("address", ["", "host", "host:99999"])
def test_an_invalid_address_is_refused(replica: Replica, address: str) -> None:
    for request in (HaveLog(0, address), TookOver(address, 1, 5)):
        with pytest.raises(ConfigError, match="must be host:port"):
            ask(replica, request)
    assert (replica.address, replica.successor) == (None, None)
