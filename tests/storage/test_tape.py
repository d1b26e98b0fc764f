"""The tape: complete lines, cut to the log."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_diloco.errors import CorruptLogError, StorageError
from lightning_diloco.storage import tape as tape_module
from lightning_diloco.storage.tape import Tape, read_new, read_tape


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tape" / "events.jsonl"


@pytest.fixture
def tape(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tape]:
    monkeypatch.setattr(tape_module, "time", SimpleNamespace(time=count(1_700_000_000.5).__next__))
    tape = Tape(path)
    yield tape
    tape.close()


def events(path: Path) -> list[str]:
    return [line["event"] for line in read_tape(path)]


def test_lines_have_time_event_lsn_and_fields(tape: Tape, path: Path) -> None:
    tape.record("join", lsn=1, learner="l0")
    tape.record("stall", lsn=None, stall_s=0.25)
    assert list(read_tape(path)) == [
        {"t": 1_700_000_000.5, "event": "join", "lsn": 1, "learner": "l0"},
        {"t": 1_700_000_001.5, "event": "stall", "lsn": None, "stall_s": 0.25},
    ]
    assert tape.last_lsn == 1


def test_torn_last_line_is_cut_and_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # many tapes, none of which depends on fsync
    tape = Tape(path)
    tape.record("join", lsn=1)
    tape.record("commit", lsn=2)
    tape.close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        assert events(path) == ["join"]
        reopened = Tape(path)
        assert (reopened.torn_bytes, reopened.last_lsn) == (size - first, 1)
        reopened.record("leave", lsn=2)
        reopened.close()
        assert events(path) == ["join", "leave"]


def test_tape_ahead_of_the_log_is_cut_to_it(path: Path, tape: Tape) -> None:
    for event, lsn in [("join", 1), ("commit", 2), ("stall", None), ("commit", 3), ("stall", None)]:
        tape.record(event, lsn=lsn)
    assert tape.truncate_after(3) == 0
    assert tape.truncate_after(2) > 0
    assert events(path) == ["join", "commit", "stall"]
    assert tape.last_lsn == 2
    tape.record("leave", lsn=3)
    assert events(path) == ["join", "commit", "stall", "leave"]
    tape.truncate_after(0)
    assert (events(path), tape.last_lsn) == ([], 0)


def test_new_lines_are_read_once_and_from_the_new_end_of_a_tape_that_was_cut(path: Path) -> None:
    assert (list(read_tape(path)), read_new(path, 0)) == ([], ([], 0))
    tape = Tape(path)
    for lsn in (1, 2):
        tape.record("commit", lsn=lsn)
    tape.close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[:-3])
    lines, position = read_new(path, 0)
    assert ([line["lsn"] for line in lines], position) == ([1], first)
    path.write_bytes(whole)
    lines, position = read_new(path, position)
    assert ([line["lsn"] for line in lines], position) == ([2], len(whole))
    assert read_new(path, position) == ([], position)
    path.write_bytes(whole[:first])
    assert read_new(path, position) == ([], first)


def test_damaged_line_is_named(path: Path) -> None:
    tape = Tape(path)
    tape.record("join", lsn=1)
    tape.record("commit", lsn=2)
    tape.close()
    path.write_bytes(path.read_bytes().replace(b'"join"', b'"join', 1))
    with pytest.raises(CorruptLogError, match=r"events.jsonl, line 1, is .*; a line must be .*; restore"):
        list(read_tape(path))
    with pytest.raises(CorruptLogError, match="line 1"):
        Tape(path)


def test_opening_reads_the_end_of_a_long_tape_only(path: Path, tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    for lsn in range(1, 60):
        tape.record("commit", lsn=lsn, text="x" * 50)
    for _ in range(9):
        tape.record("stall", lsn=None)
    tape.close()
    whole = path.read_bytes()
    monkeypatch.setattr(tape_module, "_END_BYTES", 200)  # none of these lines has an lsn, so that it reads further back
    monkeypatch.setattr(Tape, "_measure", lambda self: pytest.fail("all of it was read"))
    for torn in (b"", b'{"t": 1'):
        path.write_bytes(whole + torn)
        opened = Tape(path)
        assert (opened.last_lsn, opened.torn_bytes) == (59, len(torn))
        opened.close()
        assert path.read_bytes() == whole
    monkeypatch.undo()
    monkeypatch.setattr(tape_module, "_END_BYTES", 200)
    path.write_bytes(whole + b"[]\n")
    with pytest.raises(CorruptLogError, match="line 69"):
        Tape(path)


@pytest.mark.parametrize("line", [b"[]", b"3", b'{"event": "join"}', b'{"t":1.0,"event":"\xff","lsn":1}'])
def test_line_that_is_not_an_event_is_an_error(path: Path, line: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(line + b"\n")
    with pytest.raises(CorruptLogError, match="line 1"):
        Tape(path)


def test_full_disk_leaves_the_tape_unchanged(tape: Tape, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tape.record("join", lsn=1)
    before = path.read_bytes()
    pwrite = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if len(data) > 10:
            return pwrite(fd, data[:10], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match="No space left"):
            tape.record("commit", lsn=2)
    assert (path.read_bytes(), tape.last_lsn) == (before, 1)
    tape.record("commit", lsn=2)
    assert events(path) == ["join", "commit"]


@pytest.mark.parametrize("failing_calls", [["fsync"], ["fsync", "ftruncate"]])
def test_failed_sync_removes_the_lines_since_the_last_sync(
    tape: Tape, path: Path, monkeypatch: pytest.MonkeyPatch, failing_calls: list[str]
) -> None:
    tape.record("join", lsn=1)
    tape.sync()
    tape.record("commit", lsn=2)

    def failing(fd: int, size: int = 0) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        for call in failing_calls:
            disk.setattr(os, call, failing)
        with pytest.raises(StorageError, match="could not fsync"):
            tape.sync()
    assert tape.last_lsn == 1
    tape.record("leave", lsn=2)
    assert events(path) == ["join", "leave"]


def test_every_line_is_plain_json(tape: Tape, path: Path) -> None:
    tape.record("commit", lsn=1, contributors=["l0", "ü"], norms={"w": 1e-30})
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["contributors"] == ["l0", "ü"]


def test_complete_lines_of_another_tape_are_appended(tape: Tape, tmp_path: Path, path: Path) -> None:
    other = Tape(tmp_path / "other.jsonl")
    other.record("join", lsn=1)
    other.record("commit", lsn=2)
    text = (tmp_path / "other.jsonl").read_bytes()
    tape.copy(text[:-3])
    assert (events(path), tape.last_lsn) == (["join"], 1)
    tape.copy(text[tape.nbytes :])
    tape.copy(b"")
    assert (events(path), tape.last_lsn) == (["join", "commit"], 2)
    with pytest.raises(CorruptLogError, match="must be a JSON object"):
        tape.copy(text[5:])
    assert path.read_bytes() == text
    other.close()


def test_lines_of_another_tape_that_are_ahead_of_this_log_are_left_out(tape: Tape, tmp_path: Path, path: Path) -> None:
    other = Tape(tmp_path / "other.jsonl")
    for event, lsn in (("join", 1), ("stall", None), ("commit", 2), ("stall", None)):
        other.record(event, lsn=lsn)
    text = (tmp_path / "other.jsonl").read_bytes()
    assert [line["event"] for line in tape.copy(text, 1)] == ["join", "stall"]
    assert tape.copy(text[tape.nbytes :], 1) == []
    assert [line["event"] for line in tape.copy(text[tape.nbytes :], 2)] == ["commit", "stall"]
    assert path.read_bytes() == text
    other.close()


def test_numbers_that_are_not_finite_are_read(tape: Tape, path: Path) -> None:
    tape.record("outer", lsn=1, norms=[math.nan, -math.inf])
    (line,) = read_tape(path)
    assert math.isnan(line["norms"][0])
    assert line["norms"][1] == -math.inf
