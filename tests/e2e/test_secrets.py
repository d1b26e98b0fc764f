"""Files of a real run: two of them have the token, and other users of this machine can read none."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_diloco.errors import AuthError
from lightning_diloco.transport.flight import FlightConnection
from tests.e2e.conftest import Processes, until

pytestmark = pytest.mark.slow


def holding(root: Path, secret: str) -> set[str]:
    """Return the files below root that contain this text."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix() for path in files if secret.encode() in path.read_bytes()}


def open_to_others(root: Path) -> set[str]:
    files = [path for path in root.rglob("*") if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    return {path.relative_to(root).as_posix() for path in files}


def test_a_token_is_in_no_log_and_no_file_is_open_to_others(processes: Processes) -> None:
    syncer = processes.syncer(1)
    learner = processes.learner("l0")
    until(lambda: processes.status()["num_commits"] >= 4, "commits", processes)
    address, guess = processes.address, "a-token-that-somebody-guessed"
    stranger = FlightConnection(replace(address, token=guess))
    with pytest.raises(AuthError):
        stranger.status()
    stranger.close()
    processes.stop_file.touch()
    assert [processes.end(learner), processes.end(syncer)] == [0, 0]

    assert "l0" in processes.logs(), "there are logs"
    assert holding(processes.root, address.token) == {"run/join", "run/standby"}
    assert holding(processes.root, guess) == set()
    assert open_to_others(processes.run_dir) == set()


def test_an_embedded_syncer_does_not_reveal_its_token(processes: Processes) -> None:
    learner = processes.alone()
    (join,) = until(lambda: list(processes.root.rglob("join")), "the join file", processes)
    until((join.parent / "tape" / "events.jsonl").exists, "a run", processes)
    token = join.read_text().partition("#")[2].partition(",")[0].strip()
    assert len(token) > 20
    processes.stop_file.touch()
    assert processes.end(learner) == 0
    assert holding(processes.root, token) == {join.relative_to(processes.root).as_posix()}
    assert open_to_others(join.parent) == set()
