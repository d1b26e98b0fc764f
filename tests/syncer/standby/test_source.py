"""A standby's copy of a run: whole, or not there."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.errors import CorruptLogError, TransportError
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.syncer.standby import source as source_module
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.syncer.standby.replica import Replica
from lightning_diloco.syncer.standby.source import Source, copy_run, install_copy, is_copied, must_copy
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk, Json

KEY = "key"
LSN = 4
STATE = f"syncer/snapshot/{LSN:020d}/state.json"


class Wire:
    """Calls a `Replica` directly; fails when it is told to."""

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
    yield Wire(Replica(primary, log, KEY, lambda with_lapsed: []))
    log.close()


def made(wire: Wire) -> Source:
    return Source(Invitation(JoinAddress("h", 1, "run", "token"), KEY), wire)  # type: ignore[arg-type]


def old_copy(tmp_path: Path) -> Path:
    """A directory that has served the run before."""
    run_dir = tmp_path / "standby"
    (run_dir / "syncer" / "snapshot" / f"{1:020d}").mkdir(parents=True)
    (run_dir / "syncer" / "log").mkdir()
    (run_dir / "syncer" / "log" / f"{2:020d}.log").write_text("old")
    must_copy(run_dir)
    return run_dir


def assert_new(run_dir: Path) -> None:
    assert [path.name for path in (run_dir / "syncer" / "snapshot").iterdir()] == [f"{LSN:020d}"]
    assert (run_dir / STATE).read_text() == "new"
    assert [path.name for path in (run_dir / "syncer" / "log").iterdir()] == [f"{LSN + 1:020d}.log"]
    assert "x" in (run_dir / "tape" / "events.jsonl").read_text()
    assert is_copied(run_dir)
    assert not (run_dir / "copy").exists()


def test_a_copy_replaces_what_was_there(tmp_path: Path, wire: Wire) -> None:
    run_dir = old_copy(tmp_path)
    assert not is_copied(run_dir)
    assert copy_run(made(wire), run_dir, lambda: False)
    assert_new(run_dir)
    log = RedoLog(run_dir / "syncer" / "log")
    assert log.last_lsn == LSN
    log.close()


@pytest.mark.parametrize("num_calls", [0, 1, 2])
def test_a_copy_that_fails_leaves_what_was_there(tmp_path: Path, wire: Wire, num_calls: int) -> None:
    run_dir = old_copy(tmp_path)
    wire.calls_left = num_calls
    with pytest.raises(TransportError):
        copy_run(made(wire), run_dir, lambda: False)
    install_copy(run_dir)
    assert (run_dir / "syncer" / "log" / f"{2:020d}.log").read_text() == "old"
    assert not is_copied(run_dir)


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_a_copy_that_is_complete_is_installed_after_a_crash(
    tmp_path: Path, wire: Wire, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    run_dir, steps = old_copy(tmp_path), iter(range(num_steps))

    def crash(*args: Any, **kwargs: Any) -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        real(*args, **kwargs)

    real = source_module.shutil.rmtree
    with monkeypatch.context() as crashing:
        crashing.setattr(source_module.shutil, "rmtree", crash)
        with suppress(KeyboardInterrupt):
            copy_run(made(wire), run_dir, lambda: False)
    install_copy(run_dir)
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
