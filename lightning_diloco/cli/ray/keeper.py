"""Runs one process of a run on the machine where Ray has placed it, and restarts it: `python -m ...cli.ray.keeper`.

1. A keeper does not belong to Ray. It has a session of its own and its starter ends at once, so the loss of its actor,
   of the node's raylet or of the Ray head does not end it. It follows the order of its process (files.py).
2. The newest keeper of a process runs it. Older ones, on any machine that sees the run directory, stop their process in
   good order and end. On the same machine, the new one waits for this with a lock. If the machine is lost, there is
   nothing to wait for.
3. If the command in the order changes, the process is killed and the new command is started.
4. While the disk does not answer, the process runs on. The keeper writes its events later.
5. A learner of several hosts has a keeper on each of them. Its process starts when those of the other hosts do
   (group.py).
6. SIGTERM ends a keeper and its process in good order. Its actor then starts another one, as after any other death.

Source: our choice.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from lightning_diloco.cli.local.fleet import Fleet, Outcome
from lightning_diloco.cli.local.interruption import GRACE_S
from lightning_diloco.cli.ray.files import Desk, Order, host_names, host_of
from lightning_diloco.cli.ray.group import FirstHost, NoMeetingError, OtherHost
from lightning_diloco.process.machine import lock_here

_TICK_S, _AGAIN_S = 0.2, 2.0


class Keeper:
    """The keeper of one process.

    Args:
        run_dir: RUN_DIR.
        name: name of the process; see `host_names`.
        mark: unique mark of this keeper.
        host: name or address of this machine for other machines.
    """

    def __init__(self, run_dir: Path, name: str, mark: str, host: str) -> None:
        self._run_dir, self._name, self._mark, self._host = run_dir, name, mark, host
        self._desk = Desk(run_dir, name)
        self._read_bytes = self._desk.num_bytes
        self._is_newest = True
        self._is_asked_to_end = False

    def keep(self) -> None:
        """Run the process until it has ended for good, or a newer keeper has begun."""
        signal.signal(signal.SIGTERM, self._end)
        self._tell("began", self._host)
        try:
            self._wait_for_older_ones()
            if not self._must_go:
                outcome = self._run()
                if not self._must_go:
                    self._tell("ended", outcome)
        except Exception as error:
            self._tell("said", f"{self._name}: its keeper on {self._host} failed: {error!r}; it is started again")
            raise

    def _run(self) -> Outcome:
        order = self._order()
        os.chdir(order.cwd)
        if order.wish != "run":
            return "stopped"
        place = self._place(order)
        max_restarts = None if isinstance(place, OtherHost) else order.max_restarts  # host 0 counts
        with Fleet(max_restarts=max_restarts, say=lambda text: self._tell("said", text)) as fleet:
            try:
                fleet.start(order.command(self._name, self._run_dir, self._host, place.meet))
                while (outcome := self._outcome(fleet, order, place)) == "running":
                    order = self._follow(fleet, order, place)
                    time.sleep(_TICK_S)
                    fleet.watch()
            except NoMeetingError:
                outcome = place.outcome("stopped")
        return "stopped" if outcome == "running" else outcome

    def _place(self, order: Order) -> FirstHost | OtherHost:
        """Return the place of this host among the hosts of its learner."""
        if host_of(self._name)[1]:
            return OtherHost(self._run_dir, self._name, order, self._tell, lambda: self._must_end)
        others = host_names(self._name, order.num_hosts)[1:]
        return FirstHost(self._host, [Desk(self._run_dir, name) for name in others], self._tell)

    def _outcome(self, fleet: Fleet, order: Order, place: FirstHost | OtherHost) -> Outcome:
        own = fleet.outcome(self._name)
        must_end = own != "running" and (order.wish != "run" or self._must_go)
        return own if must_end else place.outcome(own)

    def _follow(self, fleet: Fleet, before: Order, place: FirstHost | OtherHost) -> Order:
        """Make the process follow its order and the other hosts; returns the order."""
        order = self._desk.order() or before
        if self._must_go or order.wish != "run":
            within_s = GRACE_S if self._must_go else order.within_s
            fleet.stop([self._name], within_s=within_s, is_urgent=lambda: self._is_urgent(place))
        elif (is_changed := replace(order, within_s=before.within_s) != before) or (
            place.is_over and not fleet.is_done(self._name)
        ):
            if fleet.outcome(self._name) == "running":
                if not is_changed:
                    self._tell("said", f"{self._name}: another host lost its process; all of them start again")
                os.killpg(fleet.pid(self._name), signal.SIGKILL)
            if is_changed or isinstance(place, OtherHost):  # otherwise the fleet starts it again, and counts this
                fleet.start(order.command(self._name, self._run_dir, self._host, place.meet))
        return order

    def _order(self) -> Order:
        while (order := self._desk.order()) is None:  # half written
            time.sleep(_TICK_S)
        return order

    @property
    def _wish(self) -> str | None:
        order = self._desk.order()
        return None if order is None else order.wish

    def _is_urgent(self, place: FirstHost | OtherHost) -> bool:
        """Whether a process that leaves must be killed at once, because nobody waits for it."""
        return self._wish == "kill" or place.outcome("running") != "running"

    @property
    def _must_end(self) -> bool:
        return self._wish not in ("run", None) or self._must_go

    @property
    def _must_go(self) -> bool:
        """Whether this keeper must leave the process to another one."""
        told, self._read_bytes = self._desk.events(self._read_bytes)
        for it in told:
            if it["event"] == "began":
                self._is_newest = it["keeper"] == self._mark
        return self._is_asked_to_end or not self._is_newest

    def _wait_for_older_ones(self) -> None:
        known_as = hashlib.sha256(f"{self._run_dir}\n{self._name}".encode()).hexdigest()[:24]
        while not self._must_go and not lock_here(f"{known_as}.keeper"):
            time.sleep(_TICK_S)

    def _tell(self, event: str, text: str) -> None:
        while True:
            try:
                return self._desk.tell(self._mark, event, text)
            except OSError as error:  # the process runs on
                print(f"{event} is written later: {error}", flush=True)
                time.sleep(_AGAIN_S)

    def _end(self, *_: object) -> None:
        self._is_asked_to_end = True


def main() -> None:
    """Leave the starter's process, then keep the process."""
    run_dir, name, mark, host = sys.argv[1:]
    if os.fork():
        os._exit(0)
    os.setsid()
    Keeper(Path(run_dir), name, mark, host).keep()


if __name__ == "__main__":
    main()
