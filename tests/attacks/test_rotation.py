"""After a rotation, the old token is refused, and learners that can read the run directory continue."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lightning_diloco.cli.main import main
from lightning_diloco.errors import AuthError, ConfigError, RemoteError, TransportError
from lightning_diloco.learner.rotation import RedialingConnection, rotate
from lightning_diloco.syncer.front import Front
from lightning_diloco.syncer.gated_handler import GatedHandler
from lightning_diloco.transport.address import JoinAddress, read_join_file, write_join_file
from lightning_diloco.transport.flight import FlightConnection
from tests.e2e.conftest import HERE, Processes
from tests.e2e.conftest import until as eventually
from tests.fuzz.target import Target
from tests.learner.fleet import until

OLD = JoinAddress("127.0.0.1", 1, "run", "old-token", "0" * 64)


def asks(address: JoinAddress) -> dict:
    connection = FlightConnection(address, control_deadline_s=5.0)
    try:
        return connection.status()
    finally:
        connection.close()


def test_the_old_token_is_refused_after_it_is_replaced(tmp_path: Path) -> None:
    target, door = Target(tmp_path), GatedHandler()
    door.open(target.service)
    front = Front(door, tmp_path, "127.0.0.1:0", OLD, None)
    before = front.listen()
    followed = RedialingConnection(FlightConnection, before, tmp_path / "join")
    assert followed.status()["run"] == asks(before)["run"] == "run"

    now = rotate(tmp_path)
    assert now.token != before.token
    until(lambda: front.follow_rotation() or _answers(read_join_file(tmp_path / "join")), "the new token")
    with pytest.raises(RemoteError) as refused:
        asks(before)
    assert now.token not in str(refused.value)
    assert before.token not in str(refused.value)
    with pytest.raises(RemoteError):
        followed.status()
    assert followed.status()["run"] == "run", "it has looked into the file"
    followed.close()
    front.stop()
    target.stop()


def _answers(address: JoinAddress) -> bool:
    try:
        return bool(asks(address))
    except RemoteError:
        return False


class Refused:
    """A connection to an address without an answer, unless configured otherwise; records the dialled addresses."""

    def __init__(self, dialled: list[JoinAddress], address: JoinAddress, *, answering: Collection[str] = ()) -> None:
        dialled.append(address)
        self._host, self._answering = address.host, answering

    def status(self) -> dict:
        if self._host not in self._answering:
            raise TransportError("refused")
        return {}

    def close(self) -> None:
        pass


def test_a_join_file_of_another_run_or_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    join, dialled = tmp_path / "join", []
    followed = RedialingConnection(partial(Refused, dialled), OLD, join)
    for content in (None, "not a join string", replace(OLD, run="another", token="other"), OLD):
        if isinstance(content, str):
            join.write_text(content)
        elif content is not None:
            write_join_file(join, content)
        with pytest.raises(TransportError):
            followed.status()
    assert {address.token for address in dialled} == {"old-token"}
    rotate(tmp_path)
    with pytest.raises(TransportError):
        followed.status()
    assert dialled[-1].token == read_join_file(join).token


def test_a_syncer_that_moved_is_followed_but_a_proxy_is_still_used(tmp_path: Path) -> None:
    join, dialled, proxy = tmp_path / "join", [], replace(OLD, host="proxy", port=9)
    write_join_file(join, OLD)
    answering = ["proxy"]
    followed = RedialingConnection(partial(Refused, dialled, answering=answering), proxy, join)
    followed.status()
    answering.clear()
    for told in (OLD, replace(OLD, token="new-token"), replace(OLD, host="elsewhere", port=2)):
        write_join_file(join, told)
        with pytest.raises(TransportError):
            followed.status()
    assert [(address.host, address.port) for address in dialled] == [("proxy", 9), ("proxy", 9), ("elsewhere", 2)]


def test_a_learner_that_was_given_an_old_address_finds_the_one_in_the_file(tmp_path: Path) -> None:
    join, dialled, moved = tmp_path / "join", [], replace(OLD, host="elsewhere", token="new-token")
    write_join_file(join, moved)
    answering: list[str] = []
    followed = RedialingConnection(partial(Refused, dialled, answering=answering), OLD, join)
    for _ in range(3):
        with pytest.raises(TransportError):
            followed.status()
    assert [address.host for address in dialled] == ["127.0.0.1", "elsewhere", "127.0.0.1", "elsewhere"]
    assert {address.token for address in dialled} == {"new-token"}
    answering.append("elsewhere")
    followed.status()
    answering.clear()
    with pytest.raises(TransportError):
        followed.status()
    assert len(dialled) == 4, "what has answered is not left"


def test_a_directory_that_was_never_served_has_no_token_to_replace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the run started"):
        rotate(tmp_path)


def test_the_next_syncer_of_a_run_uses_the_new_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_join_file(tmp_path / "join", OLD)
    assert main(["rotate", str(tmp_path)]) == 0
    now = read_join_file(tmp_path / "join")
    said = capsys.readouterr().out
    assert "the next one takes it" in said
    assert now.token not in said


@pytest.mark.slow
@pytest.mark.chaos
def test_learners_that_share_the_directory_continue_with_the_new_token(processes: Processes) -> None:
    processes.syncer(lease_s=5.0)
    before = processes.address
    for name in ("here", "elsewhere"):
        shares = {"DILOCO_RUN_DIR": str(processes.run_dir)} if name == "here" else {}
        arguments = ("--out", processes.root / f"{name}.json", "--until", processes.stop_file)
        env = {"DILOCO_JOIN": before.join_string(), "DILOCO_LEARNER": name, **shares}
        processes.start(name, HERE / "learner.py", *arguments, **env)
    eventually(lambda: len(processes.status()["learners"]) == 2, "two learners", processes)
    processes.until_commits(4)
    assert main(["rotate", str(processes.run_dir)]) == 0
    with pytest.raises((AuthError, TransportError)):
        asks(before)
    phases = lambda: {m["id"]: m["phase"] for m in processes.status()["learners"]}  # noqa: E731
    eventually(lambda: phases() == {"here": "stepping", "elsewhere": "lapsed"}, "who was let in", processes)
    processes.until_commits(4)
    restarted = processes.learner("elsewhere")
    eventually(lambda: set(phases().values()) == {"stepping"}, "its return with the new join string", processes)
    processes.stop_file.touch()
    assert processes.end(restarted) == 0
    assert before.token not in processes.logs()


@pytest.mark.slow
@pytest.mark.chaos
def test_a_learner_restarted_with_the_address_from_before_the_move_joins(processes: Processes) -> None:
    syncer = processes.syncer()
    before, shared = processes.address, {"DILOCO_RUN_DIR": str(processes.run_dir)}

    def start(name: str) -> subprocess.Popen[bytes]:
        arguments = ("--out", processes.root / f"{name}.json", "--until", processes.stop_file)
        return processes.start(
            name, HERE / "learner.py", *arguments, DILOCO_JOIN=before.join_string(), DILOCO_LEARNER=name, **shared
        )

    learners = [start("stays"), start("ends")]
    eventually(lambda: len(processes.status()["learners"]) == 2, "two learners", processes)
    processes.until_commits(4)
    for process in (syncer, learners.pop()):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    write_join_file(processes.run_dir / "join", replace(before, host="127.0.0.2"))
    processes.syncer()
    assert processes.address.host == "127.0.0.2"
    learners.append(start("ends"))
    phases = lambda: {(m["id"], m["phase"]) for m in processes.status()["learners"]}  # noqa: E731
    both = {("stays", "stepping"), ("ends", "stepping")}
    eventually(lambda: both <= phases(), "both learners", processes)
    processes.until_commits(4)
    processes.stop_file.touch()
    assert [processes.end(learner) for learner in learners] == [0, 0]
