"""The redo log after crashes, with a full disk, and with flipped bits."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_diloco.errors import CorruptLogError, StorageError
from lightning_diloco.storage import log_frames
from lightning_diloco.storage.redo_log import Record, RedoLog, held
from tests.storage.faults import Crash, Faults, kill

PAYLOADS = [b"", b"a" * 10, bytes(range(256)) * 40, b"z"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "log"


@pytest.fixture
def log(folder: Path) -> Iterator[RedoLog]:
    log = RedoLog(folder)
    yield log
    log.close()


@pytest.fixture
def fast_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace fsync for tests with hundreds of logs that do not depend on it."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def fill(log: RedoLog, num_records: int = 4) -> None:
    for k in range(num_records):
        log.append({"k": k}, PAYLOADS[k % len(PAYLOADS)])


def expected(lsns: range) -> list[Record]:
    return [Record(lsn, {"k": lsn - 1}, PAYLOADS[(lsn - 1) % len(PAYLOADS)]) for lsn in lsns]


def only_segment(folder: Path) -> Path:
    (path,) = folder.glob("*.log")
    return path


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def image(folder: Path, to: Path) -> Path:
    """Copy the files that a crash at this moment would leave."""
    return Path(shutil.copytree(folder, to))


def test_records_are_unchanged_after_reopening(folder: Path) -> None:
    log = RedoLog(folder)
    fill(log)
    assert log.last_lsn == 4
    assert log.durable_lsn == 0
    assert log.sync() == 4
    log.close()
    reopened = RedoLog(folder)
    assert list(reopened.records(1)) == expected(range(1, 5))
    assert list(reopened.records(3)) == expected(range(3, 5))
    assert list(reopened.records(5)) == []
    assert (reopened.torn_bytes, reopened.last_lsn, reopened.durable_lsn) == (0, 4, 4)
    assert reopened.append({"k": 4}) == 5
    reopened.close()


def test_opening_makes_records_of_a_killed_process_durable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RedoLog(folder)
    fill(log)
    kill(log)
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    reopened = RedoLog(folder)
    assert (reopened.durable_lsn, reopened.torn_bytes) == (4, 0)
    assert {str(folder), str(only_segment(folder))} <= set(synced)
    reopened.close()


def test_files_are_private(log: RedoLog, folder: Path) -> None:
    assert stat.S_IMODE(only_segment(folder).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_directory_in_use_is_refused(log: RedoLog, folder: Path) -> None:
    with pytest.raises(StorageError, match=r"in use by a syncer, or a command reads it; stop it"):
        RedoLog(folder)
    log.close()
    RedoLog(folder).close()


def test_an_error_while_the_log_is_held_is_not_taken_for_another_syncer(log: RedoLog, folder: Path) -> None:
    log.close()
    with pytest.raises(BlockingIOError), held(folder):
        raise BlockingIOError


@pytest.mark.usefixtures("fast_fsync")
def test_end_torn_at_every_byte_is_cut_and_reported(folder: Path, tmp_path: Path) -> None:
    log = RedoLog(folder)
    ends = []
    for payload in (b"first", b"second", b"third"):
        log.append({"what": "commit"}, payload)
        log.sync()
        ends.append(log.nbytes)
    log.close()
    whole = only_segment(folder).read_bytes()
    for size in range(len(whole) + 1):
        torn = tmp_path / str(size)
        torn.mkdir()
        (torn / only_segment(folder).name).write_bytes(whole[:size])
        reopened = RedoLog(torn)
        kept = sum(end <= size for end in ends)
        assert [record.lsn for record in reopened.records(1)] == list(range(1, kept + 1))
        assert reopened.torn_bytes == size - max([0, *(end for end in ends if end <= size)])
        assert reopened.append({"what": "next"}) == kept + 1
        reopened.close()


@pytest.mark.usefixtures("fast_fsync")
def test_flipped_bit_anywhere_in_an_older_record_is_named(folder: Path, tmp_path: Path) -> None:
    log = RedoLog(folder)
    starts = [0]
    for payload in (b"first", b"second", b"third"):
        log.append({"what": "commit"}, payload)
        log.sync()
        starts.append(log.nbytes)
    log.close()
    name = only_segment(folder).name
    for offset in range(starts[2]):
        damaged = image(folder, tmp_path / str(offset))
        flip(damaged / name, offset)
        lsn = 1 if offset < starts[1] else 2
        with pytest.raises(
            CorruptLogError, match=rf"{name}: the record of lsn {lsn} at byte {starts[lsn - 1]} .*backup"
        ):
            RedoLog(damaged)
        assert (damaged / name).stat().st_size == starts[3]  # nothing was cut


def test_gap_in_records_that_were_never_synced_is_a_torn_end(folder: Path) -> None:
    # A power cut may keep later pages and lose earlier ones, as long as none of them had been synced.
    log = RedoLog(folder)
    fill(log, 2)
    log.sync()
    durable = log.nbytes
    fill(log, 3)
    kill(log)
    flip(only_segment(folder), durable + 5)
    reopened = RedoLog(folder)
    assert reopened.last_lsn == 2
    assert reopened.torn_bytes > 0
    assert reopened.nbytes == durable
    reopened.close()


def test_damage_in_a_sealed_segment_is_corruption_even_at_its_end(folder: Path) -> None:
    log = RedoLog(folder)
    fill(log, 2)
    log.rotate()
    log.close()
    first = sorted(folder.glob("*.log"))[0]
    flip(first, first.stat().st_size - 1)
    with pytest.raises(CorruptLogError, match="lsn 2"):
        RedoLog(folder)


def test_missing_segment_is_corruption(folder: Path) -> None:
    log = RedoLog(folder)
    for _ in range(3):
        fill(log, 2)
        log.rotate()
    log.close()
    sorted(folder.glob("*.log"))[1].unlink()
    with pytest.raises(CorruptLogError, match=r"begins at lsn 5, expected 3; .*; restore"):
        RedoLog(folder)


def test_damage_after_opening_is_found_on_reading(log: RedoLog, folder: Path) -> None:
    fill(log, 3)
    flip(only_segment(folder), 30)
    with pytest.raises(CorruptLogError, match="lsn 1 at byte 0"):
        list(log.records(1))


def test_the_content_of_records_before_the_first_one_asked_for_is_not_read_again(log: RedoLog, folder: Path) -> None:
    fill(log, 3)
    flip(only_segment(folder), log_frames._PREFIX_BYTES)
    assert list(log.records(2)) == expected(range(2, 4))
    log.cut_after(2)
    assert log.last_lsn == 2


@pytest.mark.parametrize("version", [1, 3])
def test_another_format_is_refused_not_cut(folder: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    with monkeypatch.context() as other:
        other.setattr("lightning_diloco.storage.log_frames._VERSION", version)
        log = RedoLog(folder)
        fill(log, 1)
        log.close()
    size = only_segment(folder).stat().st_size
    with pytest.raises(StorageError, match=f"format {version}, this version reads format 2; use"):
        RedoLog(folder)
    assert only_segment(folder).stat().st_size == size


def test_rotation_and_dropping_keep_the_lsn(folder: Path) -> None:
    log = RedoLog(folder)
    fill(log, 4)
    log.rotate()
    assert log.durable_lsn == 4
    log.rotate()  # the new segment is empty: nothing to rotate
    assert len(list(folder.glob("*.log"))) == 2
    log.append({"k": 4})
    log.drop_before(4)
    assert log.first_lsn == 1
    log.drop_before(5)
    assert log.first_lsn == 5
    with pytest.raises(CorruptLogError, match=r"from lsn 4 on, the oldest kept is 5; .*; restore"):
        next(log.records(4))
    log.rotate()
    log.drop_before(6)
    assert (log.nbytes, log.first_lsn) == (0, 6)
    log.close()
    reopened = RedoLog(folder)
    assert reopened.last_lsn == 5
    assert list(reopened.records(6)) == []
    assert reopened.append({}) == 6
    reopened.close()


def test_records_span_segments_up_to_the_last_one_at_the_call(log: RedoLog) -> None:
    fill(log, 2)
    log.rotate()
    for k in (2, 3):
        log.append({"k": k}, PAYLOADS[k])
    reading = log.records(2)
    seen = [next(reading)]
    log.append({"k": 4})
    assert seen + list(reading) == expected(range(2, 5))


@pytest.mark.parametrize("point", ["append:before", "append:after_header", "append:after_payload"])
def test_full_disk_leaves_the_log_unchanged_and_appends_continue_later(folder: Path, point: str) -> None:
    faults = Faults()
    log = RedoLog(folder, faults=faults)
    fill(log, 3)
    before = only_segment(folder).read_bytes()
    faults.arm(point, 0, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(StorageError, match=r"could not append to .*No space left.*; .*; free some space") as caught:
        log.append({"k": 3}, b"x" * 100_000)
    assert caught.value.errno == errno.ENOSPC
    assert only_segment(folder).read_bytes() == before
    assert log.last_lsn == 3
    assert log.append({"k": 3}, PAYLOADS[3]) == 4
    assert list(log.records(1)) == expected(range(1, 5))
    log.close()


def test_short_and_failing_writes_leave_the_log_unchanged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RedoLog(folder)
    fill(log, 2)
    before = only_segment(folder).read_bytes()
    pwrite, room_bytes = os.pwrite, [50]

    def filling(fd: int, data: memoryview, offset: int) -> int:
        if not room_bytes[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = pwrite(fd, data[: room_bytes[0]], offset)
        room_bytes[0] -= written
        return written

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", filling)
        with pytest.raises(StorageError, match="No space left"):
            log.append({"k": 2}, PAYLOADS[2])
    assert only_segment(folder).read_bytes() == before
    fill_up = [log.append({"k": k}, PAYLOADS[k]) for k in (2, 3)]
    assert fill_up == [3, 4]
    assert list(log.records(1)) == expected(range(1, 5))
    log.close()


def test_failed_sync_removes_records_that_were_not_durable(folder: Path) -> None:
    faults = Faults()
    log = RedoLog(folder, faults=faults)
    fill(log, 2)
    log.sync()
    log.append({"k": 2}, PAYLOADS[2])
    faults.arm("sync:before", 0, OSError(errno.EIO, os.strerror(errno.EIO)))
    with pytest.raises(StorageError, match="could not fsync"):
        log.sync()
    assert log.last_lsn == 2
    assert list(log.records(1)) == expected(range(1, 3))
    assert log.append({"k": 2}, PAYLOADS[2]) == 3
    assert log.sync() == 3
    log.close()
    reopened = RedoLog(folder)
    assert list(reopened.records(1)) == expected(range(1, 4))
    reopened.close()


@pytest.mark.parametrize("point", ["append:after_header", "append:after_payload"])
def test_append_after_an_interrupted_append_succeeds(folder: Path, point: str) -> None:
    faults = Faults()
    log = RedoLog(folder, faults=faults)
    fill(log, 1)
    faults.arm(point, 0, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        log.append({"lost": True}, b"y" * 5000)
    assert log.append({"k": 1}, PAYLOADS[1]) == 2
    assert list(log.records(1)) == expected(range(1, 3))
    log.close()
    reopened = RedoLog(folder)
    assert (reopened.last_lsn, reopened.torn_bytes) == (2, 0)
    reopened.close()


@pytest.mark.parametrize("point", ["rotate:before", "rotate:after_create", "drop:before"])
def test_crash_while_rotating_or_dropping_loses_nothing(folder: Path, tmp_path: Path, point: str) -> None:
    faults = Faults()
    log = RedoLog(folder, faults=faults)
    fill(log, 4)
    faults.arm(point, 0, Crash())

    def rotate_and_drop() -> None:
        log.rotate()
        log.drop_before(3)

    with pytest.raises(Crash):
        rotate_and_drop()
    restarted = RedoLog(image(folder, tmp_path / "restart"))
    assert list(restarted.records(1)) == expected(range(1, 5))
    assert restarted.append({}) == 5
    restarted.close()
    log.close()


def test_failed_rotation_leaves_no_empty_segment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RedoLog(folder)
    fill(log, 1)

    def failing(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("lightning_diloco.storage.files.sync_directory", failing)
        with pytest.raises(StorageError, match="Input/output error"):
            log.rotate()
    log.append({"k": 1}, PAYLOADS[1])
    log.close()
    reopened = RedoLog(folder)
    assert list(reopened.records(1)) == expected(range(1, 3))
    reopened.close()


@pytest.mark.parametrize("point", ["append:after_header", "sync:before"])
def test_leftovers_of_a_failed_truncation_are_cut_off_before_a_new_segment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    faults, truncate = Faults(), os.ftruncate
    log = RedoLog(folder, faults=faults)
    fill(log)
    log.sync()

    def refuse(fd: int, length: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def write() -> None:
        log.append({"k": 4}, b"lost")
        log.sync()

    faults.arm(point, 0, OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(StorageError):
        write()
    monkeypatch.setattr(os, "ftruncate", truncate)
    log.rotate()
    log.append({"k": 4}, b"a" * 10)
    log.sync()
    kill(log)  # kill -9 while the snapshot is written
    again = RedoLog(folder)
    assert [record.lsn for record in again.records(1)] == [1, 2, 3, 4, 5]
    again.close()


def test_sync_reaches_the_disk_once_per_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RedoLog(folder)
    fsync, calls = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(fd), fsync(fd)))
    fill(log, 3)
    assert calls == []
    log.sync()
    log.sync()
    assert len(calls) == 1
    log.close()


def fill_segments(log: RedoLog) -> None:
    """Write twelve records in four segments, and begin an empty fifth segment."""
    for _ in range(4):
        fill(log, 3)
        log.rotate()


@pytest.mark.parametrize("lsn", range(3, 13))
def test_records_after_a_given_one_are_cut_off_also_after_a_crash(log: RedoLog, folder: Path, lsn: int) -> None:
    fill_segments(log)
    log.drop_before(4)
    log.cut_after(lsn)
    last = expected(range(4, lsn + 1))
    assert [record.lsn for record in log.records(4)] == [record.lsn for record in last]
    again = RedoLog(image(folder, folder.parent / "again"))
    assert (again.last_lsn, again.first_lsn) == (lsn, 4)
    again.cut_after(lsn)
    assert again.append({"k": 1}) == log.append({"k": 1}) == lsn + 1
    again.close()


@pytest.mark.parametrize("lsn", [2, 13])
def test_a_missing_record_cannot_be_the_end(log: RedoLog, lsn: int) -> None:
    fill_segments(log)
    log.drop_before(4)
    with pytest.raises(CorruptLogError):
        log.cut_after(lsn)
    assert (log.first_lsn, log.last_lsn) == (4, 12)


def test_a_crash_while_segments_are_removed_leaves_no_gap(
    log: RedoLog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_segments(log)
    unlink, removed = Path.unlink, []

    def crash(path: Path, **kwargs: object) -> None:
        if len(removed) == 2:
            raise Crash
        removed.append(path)
        unlink(path)

    with monkeypatch.context() as crashing:
        crashing.setattr(Path, "unlink", crash)
        with pytest.raises(Crash):
            log.cut_after(4)
    again = RedoLog(image(folder, folder.parent / "again"))
    assert again.last_lsn == 9
    again.cut_after(4)
    assert [record.lsn for record in again.records(1)] == [1, 2, 3, 4]
    again.close()
