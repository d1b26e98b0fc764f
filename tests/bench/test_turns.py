"""Tests that only one program and its children run at a time, and that no process is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_diloco.cli.faults.step_log import read_steps
from tests.alive import is_running
from tests.bench import turns

# Writes its own steps, and those of a child in another session, to files named by pid.
PROGRAM = """
import os, sys, time
from array import array
if len(sys.argv) == 2:
    import subprocess
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"], start_new_session=True)
kind = "steps" if len(sys.argv) == 2 else "child"
with open(f"{sys.argv[1]}/{kind}-{os.getpid()}.f64", "ab", buffering=0) as file:
    while not os.path.exists(sys.argv[1] + "/end"):
        file.write(array("d", [time.time()]).tobytes())
        time.sleep(0.01)
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, str]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return sys.executable, str(path)


def test_no_program_is_stopped_for_longer_than_its_calls_allow(tmp_path: Path, program: tuple[str, str]) -> None:
    with turns.playing({"a": program, "b": program}, tmp_path, env={}, warm_up=3) as players:
        with pytest.raises(ValueError, match="2 players in turns of 10 s: each is stopped for 10 s"):
            turns.take_turns(players.values(), rounds=2, turn_s=10.0)
        assert not any(player.turns for player in players.values())


@pytest.mark.seconds
def test_only_one_program_runs_at_a_time(tmp_path: Path, program: tuple[str, str]) -> None:
    names = ("a", "b")
    with turns.playing(dict.fromkeys(names, program), tmp_path, env={}, warm_up=3) as players:
        turns.take_turns(players.values(), rounds=3, turn_s=0.5)
        for name, other in (names, names[::-1]):
            assert len(players[name].turns) == 3
            (child,) = (tmp_path / name).glob("child-*.f64")
            for times_s in (players[name].steps_s, read_steps(child)):
                assert all(turns.within(turn, times_s) for turn in players[name].turns), "it played"
                assert not any(turns.within(turn, times_s) for turn in players[other].turns), "it was stopped"
        (tmp_path / "a" / "end").touch()
        players["a"].end()
        pids = [int(path.stem.rpartition("-")[2]) for path in (tmp_path / "b").glob("*-*.f64")]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def test_a_failing_program_is_reported(tmp_path: Path) -> None:
    failing = (sys.executable, "-c", "raise SystemExit('no such device')")
    with (
        pytest.raises(RuntimeError, match="a program failed:\nno such device"),
        turns.playing({"a": failing}, tmp_path, env={}, warm_up=3),
    ):
        pass


@pytest.mark.parametrize(
    ("times_s", "steps"), [([0.9, 1.0, 1.5, 2.0, 2.5], 2), ([0.9, 2.5], 0), ([], 0)], ids=["two", "across", "none"]
)
def test_a_step_counts_if_it_lies_within_a_turn(times_s: list[float], steps: int) -> None:
    assert turns.within((1.0, 2.0), times_s) == [0.5] * steps
