"""Runs programs in turns on one machine, so that all of them see the same load.

1. A machine's speed changes within minutes by more than the differences that a bench measures. Therefore the compared
   programs run interleaved: one runs while the others, with all their child processes, are stopped (SIGSTOP).
2. A program's background work is stopped with it, so each pays for its own work in its own turns. A program must not be
   stopped for longer than a call to the syncer may take (MAX_PAUSE_S). Otherwise it considers the syncer gone and
   exchanges nothing for a while. Landings are counted to detect that.
3. A step counts if it lies completely within one turn and after its first seconds. In these, caches fill, and exchanges
   that the pause interrupted are late.
4. The step clock records the end of each step. Programs are killed after their last turn, unless asked to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from lightning_diloco.cli.faults import step_log as step_clock
from tests.alive import is_running
from tests.bench import landing_clock

LIMIT_S = 300.0
LOOK_S = 0.05
FIRST_S = 0.3
MAX_PAUSE_S = 9.5  # FlightConnection's deadline for a message, and a little time to send it

Turn = tuple[float, float]


class Player:
    """A program that takes turns.

    Args:
        argv: command of the program, whose step clock writes into `folder`.
        folder: existing folder, also for the output.
        env: variables added to this process's environment.
    """

    def __init__(self, argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.turns: list[Turn] = []
        self._folder, self._out = folder, folder / "out.txt"
        with self._out.open("wb") as file:
            self._process = subprocess.Popen(
                argv, stdout=file, stderr=file, env={**os.environ, **env}, start_new_session=True
            )

    @property
    def steps_s(self) -> list[float]:
        """Return the end times of its steps in unix seconds."""
        return self._noted(step_clock.PATTERN)

    def steps_by_turn(self) -> list[list[float]]:
        """Return, for each turn, the seconds of the steps that lie completely in it."""
        times_s = self.steps_s
        return [within(turn, times_s) for turn in self.turns]

    @property
    def landings_per_step(self) -> float:
        """Return the updates of the anchor that landed in its turns, per step that ended in them."""
        steps, landings = (
            sum(began_s <= at_s <= ended_s for at_s in self._noted(pattern) for began_s, ended_s in self.turns)
            for pattern in (step_clock.PATTERN, landing_clock.PATTERN)
        )
        return landings / steps

    def warm_up(self, num_steps: int) -> None:
        """Let it run for this number of steps, then stop it."""
        self._wait(lambda: len(self.steps_s) >= num_steps)
        self._signal(signal.SIGSTOP)

    def play(self, seconds: float, first_s: float) -> None:
        """Play one turn."""
        self._signal(signal.SIGCONT)
        began_s = time.time() + first_s
        time.sleep(seconds)
        self.turns.append((began_s, time.time()))
        self._check()
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """Let it run until it and all its child processes have ended."""
        pids = self._signal(signal.SIGCONT)
        self._wait(lambda: self._process.poll() is not None and not any(map(is_running, pids)))
        self._check()

    def kill(self) -> None:
        """Kill it and all its child processes, and wait until the last of them has ended."""
        if self._process.poll() is None:
            pids = self._signal(signal.SIGKILL)
            self._process.wait()
            while any(map(is_running, pids)):
                time.sleep(LOOK_S)

    def _noted(self, pattern: str) -> list[float]:
        return [at_s for path in self._folder.glob(pattern) for at_s in step_clock.read_steps(path)]

    def _wait(self, done: Callable[[], bool]) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not done():
            self._check(is_late=time.monotonic() > until_s)
            time.sleep(LOOK_S)

    def _check(self, *, is_late: bool = False) -> None:
        if is_late or self._process.poll():
            raise RuntimeError(f"a program {'is late' if is_late else 'failed'}:\n{self._out.read_text()[-4000:]}")

    def _signal(self, number: int) -> list[int]:
        """Signal it and all its child processes; returns their pids."""
        process = psutil.Process(self._process.pid)
        members = [process, *process.children(recursive=True)]
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(number)
        return [member.pid for member in members]


def take_turns(players: Collection[Player], *, rounds: int, turn_s: float, first_s: float = FIRST_S) -> None:
    """Give each player one turn per round, in fixed order, so that no pause is longer than the turns of all others.

    Args:
        players: stopped players.
        rounds: number of turns of each.
        turn_s: seconds of a turn.
        first_s: seconds at the start of a turn that do not count.

    Raises:
        ValueError: a player would be stopped for too long, see rule 2, or no part of a turn would count.
    """
    if turn_s <= first_s:
        raise ValueError(f"turns of {turn_s:g} s, of which the first {first_s:g} s do not count: nothing would")
    if (pause_s := (len(players) - 1) * turn_s) > MAX_PAUSE_S:
        raise ValueError(f"{len(players)} players in turns of {turn_s:g} s: each is stopped for {pause_s:g} s")
    for _ in range(rounds):
        for player in players:
            player.play(turn_s, first_s)


@contextlib.contextmanager
def playing(
    programs: Mapping[str, Sequence[str]], folder: Path, *, env: Mapping[str, str], warm_up: int
) -> Iterator[dict[str, Player]]:
    """Yield programs by name, each warmed up and stopped; all are killed at the end of the block.

    Args:
        programs: commands by name.
        folder: parent of a folder per program, which is the program's last argument.
        env: variables added to this process's environment, for all programs.
        warm_up: warm-up steps of each program.
    """
    players: dict[str, Player] = {}
    try:
        for name, argv in programs.items():
            (folder / name).mkdir()
            players[name] = Player((*argv, str(folder / name)), folder / name, env)
            players[name].warm_up(warm_up)
        yield players
    finally:
        for player in players.values():
            player.kill()


def within(turn: Turn, times_s: Sequence[float]) -> list[float]:
    """Return the seconds of the steps that lie completely in a turn.

    Args:
        turn: start and end of the turn.
        times_s: end times of steps.
    """
    began_s, ended_s = turn
    return [stop - start for start, stop in pairwise(times_s) if began_s <= start and stop <= ended_s]
