"""The processes of a run on a Ray cluster, with the interface of a fleet on one machine (cli/local/fleet.py).

1. A process is started by an order and an actor (files.py, host.py). From then on it is watched and ended by its files
   alone, so the end of the Ray head does not matter.
2. The number of learners may change during the run (`diloco scale`). Those with the highest numbers are removed first,
   and added last. The syncer is started again, because it must expect another number of them to finish.
3. A process whose machine does not answer is reported, and removed from Ray, so that Ray does not start it again.
4. A learner of several hosts is one process here, whose outcome is that of host 0 (group.py).
5. If `diloco run` was killed, the next one takes over the processes that it had started, with their commands.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import cast

from lightning_diloco.cli.local.fleet import Command, Outcome
from lightning_diloco.cli.local.interruption import GRACE_S
from lightning_diloco.cli.local.run import SYNCER, Plan
from lightning_diloco.cli.ray import cluster
from lightning_diloco.cli.ray.files import Desk, Order, Wanted, Wants, Wish, host_names
from lightning_diloco.errors import ConfigError
from lightning_diloco.transport.address import read_join_file

_POLL_S, _PLACE_S = 0.1, 20.0
_ANSWER_S = 10.0  # additional time for the keeper and the shared disk


class _Process:
    """The state of one process, as far as it is known."""

    def __init__(self, run_dir: Path, name: str, order: Order) -> None:
        self.desks = {host: Desk(run_dir, host) for host in host_names(name, order.num_hosts)}
        self.desk, self.order = self.desks[name], order
        self.read_bytes = {host: desk.num_bytes for host, desk in self.desks.items()}  # of earlier keepers
        self.keeper: str | None = None
        self.outcome: Outcome = "running"
        self.placed_s = time.monotonic()
        self.is_said_to_wait = False

    @classmethod
    def found(cls, run_dir: Path, name: str) -> _Process | None:
        """Return the process that an earlier `diloco run` had started; None if it had started none."""
        desk = Desk(run_dir, name)
        order, keeper = desk.order(), desk.newest()
        if order is None or order.wish != "run" or keeper is None:
            return None
        process = cls(run_dir, name, order)
        process.keeper, process.outcome = keeper, cast("Outcome", desk.ended(keeper) or "running")
        return process

    def wish(self, wish: Wish, within_s: float = 0.0) -> None:
        """Write this wish into the order of its keeper."""
        self.order = replace(self.order, wish=wish, within_s=within_s)
        self.desk.write_order(self.order)

    def expect(self, num_learners: int) -> None:
        """Change the number of learners that a syncer waits for."""
        words = list(self.order.words)
        words[words.index("--expect") + 1] = str(num_learners)
        self.order = replace(self.order, words=tuple(words))
        self.desk.write_order(self.order)


class RayFleet:
    """The processes of one run.

    Args:
        plan: the run.
        wants: the cluster, and what a learner needs of it.
        say: called with messages, in whole lines.
    """

    def __init__(self, plan: Plan, wants: Wants, *, say: Callable[[str], None]) -> None:
        self._plan, self._wants, self._say = plan, wants, say
        self._processes: dict[str, _Process] = {}
        self._num_learners = plan.num_learners
        self._wanted = Wanted(plan.run_dir)

    def __enter__(self) -> RayFleet:
        if self._plan.is_served:
            self._take_over()
        else:
            self._wanted.write(replace(self._wants, auth_mode=os.environ.get("RAY_AUTH_MODE")))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._wanted.close()
        self.stop(list(self._processes), within_s=2.0)

    @property
    def names(self) -> list[str]:
        """Names of the processes that the run should have."""
        removed = self._removed()
        return [name for name in self._processes if name not in removed]

    def start(self, command: Command) -> None:
        """Place and start one process, or take over one that already runs."""
        if self._runs(command.name):
            return  # it was taken over
        run_dir, is_syncer = self._plan.run_dir, command.name == SYNCER
        if command.done_path is not None:
            command.done_path.unlink(missing_ok=True)
        known_as = f"{run_dir.name}-{command.name}-{secrets.token_hex(3)}"
        order, since = Order.of(command, self._plan.max_restarts, known_as), Desk(run_dir, command.name).num_bytes
        num_hosts = 1 if is_syncer else self._wants.num_hosts
        process = _Process(run_dir, command.name, replace(order, num_hosts=num_hosts, since=since))
        process.wish("run")
        self._processes[command.name] = process
        needs = cluster.SYNCER_NEEDS if is_syncer else self._wants.needs
        with cluster.connected(self._wants.address):
            cluster.place(known_as, command.name, run_dir, needs, in_group=not is_syncer, num_hosts=num_hosts)

    def _take_over(self) -> None:
        """Take over the processes of an earlier `diloco run`. `watch` then adjusts the number of learners."""
        for name in Desk.names(self._plan.run_dir):
            if found := _Process.found(self._plan.run_dir, name):
                self._processes[name] = found
        self._num_learners = len(self._processes.keys() - {SYNCER})

    def _runs(self, name: str) -> bool:
        return name in self._processes and self._processes[name].order.wish == "run"

    def watch(self) -> None:
        """Read the events of the keepers, and apply `diloco scale`. Does not block."""
        self._read()
        self._say_who_waits()
        wanted = self._wanted.read()
        if wanted is not None and wanted.num_learners != self._num_learners:
            try:
                self._scale(wanted.num_learners)
            except ConfigError as error:
                self._say(f"the number of learners could not be changed: {error}")

    def _read(self) -> None:
        for name, process in self._processes.items():
            for host, desk in process.desks.items():
                told, process.read_bytes[host] = desk.events(process.read_bytes[host])
                for it in told:
                    self._hear(process, host, is_first=host == name, **it)

    def _hear(self, process: _Process, host: str, *, is_first: bool, keeper: str, event: str, text: str) -> None:
        if event == "began":
            self._say(f"{host} is on {text}")
            if is_first:
                process.keeper, process.outcome = keeper, "running"
        elif event == "said":
            self._say(text)
        elif event == "ended" and is_first and keeper == process.keeper:
            process.outcome = cast("Outcome", text)

    def _say_who_waits(self) -> None:
        for name, process in self._processes.items():
            is_late = process.keeper is None and time.monotonic() > process.placed_s + _PLACE_S
            if is_late and not process.is_said_to_wait:
                process.is_said_to_wait = True
                num = process.order.num_hosts
                nodes = "a node" if num == 1 else f"{num} nodes"
                self._say(f"{name} waits for {nodes}: Ray has too few free resources, or cannot start it yet")

    def _scale(self, num_learners: int) -> None:
        self._num_learners = num_learners
        self._processes[SYNCER].expect(num_learners)
        for name in self._removed():
            self._processes[name].wish("leave", GRACE_S)
        address = read_join_file(self._plan.run_dir / "join")
        for name in (f"l{k}" for k in range(num_learners)):
            self.start(self._plan.learner(name, address))
        self._say(f"the run has {num_learners} learner(s) from now on")

    def outcome(self, name: str) -> Outcome:
        """Return the state of a process as of the last `watch` or `stop`."""
        return self._processes[name].outcome

    def is_done(self, name: str) -> bool:
        """Return whether a process has written its `done_path`."""
        done = self._processes[name].order.done_path
        return done is not None and Path(done).exists()

    def stop(
        self,
        names: Iterable[str],
        *,
        within_s: float,
        is_urgent: Callable[[], bool] = lambda: False,
        is_done: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Stop processes in good order, and kill those that still run after `within_s`; see `Fleet.stop`.

        This also waits for learners that `diloco scale` has removed.
        """
        stopped = [name for name in {*names, *self._removed()} if self.outcome(name) == "running"]
        for name in stopped:
            self._processes[name].wish("leave", within_s)
        placed = [name for name in stopped if self._processes[name].keeper is not None]
        if unplaced := [name for name in stopped if name not in placed]:
            self._forget(unplaced, "was not placed yet")
        late = self._still_running(placed, within_s + _ANSWER_S, is_urgent)
        for name in late:
            self._processes[name].wish("kill")
        if lost := self._still_running(late, _ANSWER_S):
            self._forget(lost, "no answer from its machine, where it ends when it sees the run directory again")

    def _still_running(
        self, names: list[str], after_s: float, is_urgent: Callable[[], bool] = lambda: False
    ) -> list[str]:
        """Wait up to this time for these processes to end; return those that still run."""
        deadline_s = time.monotonic() + after_s
        while names and time.monotonic() < deadline_s and not is_urgent():
            time.sleep(_POLL_S)
            self._read()
            names = [name for name in names if self.outcome(name) == "running"]
        return names

    def _forget(self, names: list[str], why: str) -> None:
        """Remove these processes from Ray, so that it does not start them again."""
        self._say(f"{', '.join(names)}: {why}; Ray does not start it again")
        for name in names:
            self._processes[name].outcome = "stopped"
        try:
            orders = [self._processes[name].order for name in names]
            with cluster.connected(self._wants.address):
                cluster.release([name for it in orders for name in host_names(it.known_as, it.num_hosts)])
        except ConfigError as error:
            self._say(f"Ray could not be told: {error}")

    def _removed(self) -> set[str]:
        """Return the learners that `diloco scale` has removed."""
        return set(self._processes) - {SYNCER} - {f"l{k}" for k in range(self._num_learners)}
