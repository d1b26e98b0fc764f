"""A cursor reads a log that is being written, rotated and shortened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_diloco.errors import CorruptLogError
from lightning_diloco.storage.log_cursor import LogCursor
from lightning_diloco.storage.log_frames import Record, read_at
from lightning_diloco.storage.redo_log import RedoLog


@pytest.fixture
def redo_log(tmp_path: Path) -> Iterator[RedoLog]:
    log = RedoLog(tmp_path)
    yield log
    log.close()


def written(log: RedoLog, num: int) -> None:
    for _ in range(num):
        log.append({"number": log.last_lsn + 1}, bytes([log.last_lsn % 256]) * 100)
    log.sync()


def records(text: bytes) -> list[Record]:
    found, offset = [], 0
    while offset < len(text):
        placed = read_at(memoryview(text), offset, len(text))
        assert placed is not None
        found.append(placed.record)
        offset = placed.end
    return found


def test_durable_records_are_returned_in_order(redo_log: RedoLog) -> None:
    written(redo_log, 3)
    cursor = LogCursor(redo_log, 0)
    found = records(cursor.take(1 << 20))
    assert [(r.lsn, r.header, r.payload[:1]) for r in found] == [(n, {"number": n}, bytes([n - 1])) for n in (1, 2, 3)]
    redo_log.append({"number": 4})
    assert cursor.take(1 << 20) == b""
    redo_log.sync()
    assert [r.lsn for r in records(cursor.take(1 << 20))] == [4]
    cursor.close()


def test_a_small_limit_gives_one_record_at_a_time(redo_log: RedoLog) -> None:
    written(redo_log, 3)
    cursor = LogCursor(redo_log, 1)
    assert [[r.lsn for r in records(cursor.take(1))] for _ in range(3)] == [[2], [3], []]
    cursor.close()


def test_the_cursor_follows_new_segments_and_keeps_dropped_ones(redo_log: RedoLog) -> None:
    written(redo_log, 2)
    cursor = LogCursor(redo_log, 1)
    redo_log.rotate()
    written(redo_log, 2)
    redo_log.drop_before(3)
    assert [r.lsn for r in records(cursor.take(1 << 20))] == [2, 3, 4]
    cursor.close()
    cursor = LogCursor(redo_log, 4)
    written(redo_log, 1)
    assert [r.lsn for r in records(cursor.take(1 << 20))] == [5]
    cursor.close()
    with pytest.raises(CorruptLogError, match="the oldest kept is 3"):
        LogCursor(redo_log, 1)


def test_a_position_beyond_the_end_is_an_error(redo_log: RedoLog) -> None:
    written(redo_log, 2)
    with pytest.raises(CorruptLogError, match="lsn 3 is not where it must be"):
        LogCursor(redo_log, 5)
