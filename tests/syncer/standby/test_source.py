"""A standby's copy of a run is complete or absent."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.errors import CorruptLogError, TransportError
from lightning_diloco.protocol.syncer.succession import Fleets
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.syncer import replacement
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.syncer.standby.replica import Replica
from lightning_diloco.syncer.standby.source import (
    Source,
    copy_run,
    cut_to_common,
    differs_after,
    is_copied,
)
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk, Json

KEY = "key"
LSN = 4
STATE = f"syncer/snapshot/{LSN:020d}/state.json"


class Wire:
    """Calls a `Replica` directly; fails on request."""

    def __init__(self, replica: Replica) -> None:
        self.send = self.poll = self.put = self.status = self.close = None
        self.replica, self.calls_left = replica, 1000

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise TransportError("cut")
        return self.replica.on_get(header)


@pytest.fixture
def primary(tmp_path: Path) -> Path:
    run_dir = tmp_path / "primary"
    (run_dir / STATE).parent.mkdir(parents=True)
    (run_dir / STATE).write_text("new")
    (run_dir / "tape").mkdir()
    (run_dir / "tape" / "events.jsonl").write_text(json.dumps({"t": 1.0, "event": "x", "lsn": 4}) + "\n")
    return run_dir


@pytest.fixture
def wire(primary: Path) -> Any:
    log = RedoLog(primary / "syncer" / "log")
    yield Wire(Replica(primary, log, KEY, Fleets()))
    log.close()


def made(wire: Wire) -> Source:
    return Source(Invitation(JoinAddress("h", 1, "run", "token", "0" * 64), KEY), wire)  # type: ignore[arg-type]


def old_copy(tmp_path: Path) -> Path:
    """Return a directory that has served the run before."""
    run_dir = tmp_path / "standby"
    (run_dir / "syncer" / "snapshot" / f"{1:020d}").mkdir(parents=True)
    (run_dir / "syncer" / "log").mkdir()
    (run_dir / "syncer" / "log" / f"{2:020d}.log").write_text("old")
    differs_after(run_dir, 0)
    return run_dir


def assert_new(run_dir: Path) -> None:
    assert [path.name for path in (run_dir / "syncer" / "snapshot").iterdir()] == [f"{LSN:020d}"]
    assert (run_dir / STATE).read_text() == "new"
    assert [path.name for path in (run_dir / "syncer" / "log").iterdir()] == [f"{LSN + 1:020d}.log"]
    assert "x" in (run_dir / "tape" / "events.jsonl").read_text()
    assert is_copied(run_dir)
    assert not (run_dir / "copy").exists()


def test_a_copy_replaces_the_previous_files(tmp_path: Path, wire: Wire) -> None:
    run_dir = old_copy(tmp_path)
    assert not is_copied(run_dir)
    assert copy_run(made(wire), run_dir, lambda: False)
    assert_new(run_dir)
    log = RedoLog(run_dir / "syncer" / "log")
    assert log.last_lsn == LSN
    log.close()


@pytest.mark.parametrize("num_calls", [0, 1, 2])
def test_a_failed_copy_keeps_the_previous_files(tmp_path: Path, wire: Wire, num_calls: int) -> None:
    run_dir = old_copy(tmp_path)
    wire.calls_left = num_calls
    with pytest.raises(TransportError):
        copy_run(made(wire), run_dir, lambda: False)
    replacement.install(run_dir)
    assert (run_dir / "syncer" / "log" / f"{2:020d}.log").read_text() == "old"
    assert not is_copied(run_dir)


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_a_complete_copy_is_installed_after_a_crash(
    tmp_path: Path, wire: Wire, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    run_dir, steps = old_copy(tmp_path), iter(range(num_steps))

    def crash(*args: Any, **kwargs: Any) -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        real(*args, **kwargs)

    real = replacement.remove_tree
    with monkeypatch.context() as crashing:
        crashing.setattr(replacement, "remove_tree", crash)
        with suppress(KeyboardInterrupt):
            copy_run(made(wire), run_dir, lambda: False)
    replacement.install(run_dir)
    assert_new(run_dir)


def test_a_snapshot_that_is_replaced_during_the_copy_is_an_error(tmp_path: Path, wire: Wire, primary: Path) -> None:
    source = made(wire)
    listing = source.listing
    source.listing = lambda: (listing(), (primary / STATE).unlink())[0]  # type: ignore[method-assign]
    with pytest.raises(CorruptLogError, match="begin the copy again"):
        copy_run(source, tmp_path / "standby", lambda: False)


def test_a_copy_waits_for_start_values_unless_it_is_stopped(tmp_path: Path, wire: Wire, primary: Path) -> None:
    (primary / STATE).unlink()
    (primary / STATE).parent.rmdir()
    assert not copy_run(made(wire), tmp_path / "standby", lambda: True)
    assert not is_copied(tmp_path / "standby")


# ------------------------------------------------------------------------------------------ a former primary comes back

COMMON = 6


def former_primary(tmp_path: Path, *, snapshot: int = 2, num_records: int = 9, differs_from: int = COMMON + 1) -> Path:
    """Return a directory that has served the run before, whose log begins after its snapshot."""
    run_dir = tmp_path / "former"
    (run_dir / "syncer" / "snapshot" / f"{snapshot:020d}").mkdir(parents=True)
    folder = run_dir / "syncer" / "log"
    folder.mkdir()
    (run_dir / "tape").mkdir()
    (run_dir / "tape" / "events.jsonl").write_text("of its own")
    (folder / f"{snapshot + 1:020d}.log").touch()
    log = RedoLog(folder)
    write(log, range(snapshot + 1, num_records + 1), differs_from)
    log.close()
    differs_after(run_dir, COMMON)
    return run_dir


def write(log: RedoLog, lsns: range, differs_from: int = 1 << 60) -> None:
    for lsn in lsns:
        log.append({"n": lsn}, b"other" if lsn >= differs_from else b"same")
        if lsn % 4 == 0:
            log.rotate()
    log.sync()


def records_in(run_dir: Path) -> list[tuple[int, bytes]]:
    log = RedoLog(run_dir / "syncer" / "log")
    found = [(record.lsn, bytes(record.payload)) for record in log.records(log.first_lsn)]
    log.close()
    return found


@pytest.mark.parametrize("num_records", [COMMON, COMMON + 1, 9, 13])
def test_a_former_primary_keeps_the_common_records(tmp_path: Path, primary: Path, wire: Wire, num_records: int) -> None:
    write(wire.replica._log, range(1, 12))
    run_dir = former_primary(tmp_path, num_records=num_records)
    assert cut_to_common(made(wire), run_dir)
    assert records_in(run_dir) == [(lsn, b"same") for lsn in range(3, COMMON + 1)]
    assert (run_dir / "tape" / "events.jsonl").read_text() == (primary / "tape" / "events.jsonl").read_text()
    assert is_copied(run_dir)


@pytest.mark.parametrize(
    "found",
    [
        {"snapshot": COMMON + 1},  # it has decisions that the successor lacks
        {"num_records": COMMON - 1},  # its disk was rolled back
        {"differs_from": COMMON},  # the successor's disk was rolled back
    ],
)
def test_a_former_primary_that_cannot_know_the_common_records_copies_the_run(
    tmp_path: Path, wire: Wire, found: dict[str, int]
) -> None:
    write(wire.replica._log, range(1, 12))
    run_dir = former_primary(tmp_path, **found)
    before = records_in(run_dir)
    assert not cut_to_common(made(wire), run_dir)
    assert records_in(run_dir) == before
    assert not is_copied(run_dir)


def test_a_former_primary_copies_the_run_if_the_successor_has_dropped_its_log(tmp_path: Path, wire: Wire) -> None:
    write(wire.replica._log, range(1, 12))
    wire.replica._log.drop_before(9)
    assert not cut_to_common(made(wire), former_primary(tmp_path))


def test_a_former_primary_that_was_not_told_the_common_records_copies_the_run(tmp_path: Path, wire: Wire) -> None:
    write(wire.replica._log, range(1, 12))
    differs_after(run_dir := former_primary(tmp_path), 0)
    assert not cut_to_common(made(wire), run_dir)


def test_a_former_primary_with_a_damaged_log_copies_the_run(tmp_path: Path, wire: Wire) -> None:
    write(wire.replica._log, range(1, 12))
    run_dir = former_primary(tmp_path)
    first = min((run_dir / "syncer" / "log").iterdir())
    data = bytearray(first.read_bytes())
    data[5] ^= 1
    first.write_bytes(data)
    source = made(wire)
    assert not cut_to_common(source, run_dir)
    assert copy_run(source, run_dir, lambda: False)
    assert is_copied(run_dir)
