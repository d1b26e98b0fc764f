"""A run on this machine: one syncer and N learners, until all of them have finished.

1. Learners start after the syncer has written RUN_DIR/join.
2. If a learner gives up, the others go on. If the syncer gives up, the run ends. After the syncer has finished, a
   learner that dies during its exit is not restarted. A learner whose script fails after its training is not restarted
   either.
3. After the last learner, the syncer has `linger_s` to write the summary. Learners from elsewhere keep it running.
4. On an interrupt, learners get SIGTERM first and write a checkpoint. The syncer then still merges their last
   contributions. A second signal kills everything at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from lightning_diloco.cli.local import spare
from lightning_diloco.cli.local.display import Screen
from lightning_diloco.cli.local.echo import Echo
from lightning_diloco.cli.local.feed import Fetch, Status, StatusFeed, asking
from lightning_diloco.cli.local.fleet import Command, Fleet, Outcome
from lightning_diloco.cli.local.interruption import CTRL_C_GRACE_S, GRACE_S, Interruption
from lightning_diloco.learner.name import FINISHED
from lightning_diloco.process.machine import cores_here
from lightning_diloco.storage.local_runs import summary_of
from lightning_diloco.transport.address import JoinAddress, read_join_file

Ask = Callable[[JoinAddress, Path], AbstractContextManager[Fetch]]
Meddle = Callable[[Any, Status | None], None]
Via = Callable[[str, JoinAddress], JoinAddress]
Tell = Callable[[str, str], Mapping[str, str]]

SYNCER = "syncer"
_FAILED = ("gave up", "refused")
_GONE = ("left", "lapsed")
_TICK_S = 0.1
_STOP_SYNCER_S, _SNAPSHOT_BPS = 10.0, 100e6


class Processes(Protocol):
    """Interface of a run to its learner and syncer processes. `Fleet` explains the methods."""

    @property
    def names(self) -> list[str]:
        """Names of the processes that the run should have."""

    def start(self, command: Command) -> None:
        """Start one process."""

    def watch(self) -> None:
        """Check every process once."""

    def outcome(self, name: str) -> Outcome:
        """Return the state of a process as of the last `watch` or `stop`."""

    def is_done(self, name: str) -> bool:
        """Return whether a process has written its `done_path`."""

    def stop(
        self,
        names: Iterable[str],
        *,
        within_s: float,
        is_urgent: Callable[[], bool] = ...,
        is_done: Callable[[str], bool] = ...,
    ) -> None:
        """Stop processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The commands of a run, and its time limits.

    Args:
        run_dir: absolute path of the run directory.
        syncer_argv: command of the syncer.
        learner_argv: command of every learner.
        num_learners: N.
        threads: OMP_NUM_THREADS of a learner; None: the value of the environment, else the cores divided by N.
        max_restarts: maximum number of restarts per process; None for no limit.
        open_s: time that the syncer may take to write its join file.
        linger_s: time that the syncer may take to end after the last learner.
        grace_s: time that learners may take to leave an interrupted run; None: CTRL_C_GRACE_S after Ctrl-C, else
            GRACE_S.
        via: maps learner and syncer address to the address that the learner dials; None: the syncer's address.
        tell: returns additional environment variables of a learner, from run id and learner id; None for none.
        is_served: whether the syncer runs already, because an earlier `diloco run` was killed.
    """

    run_dir: Path
    syncer_argv: tuple[str, ...]
    learner_argv: tuple[str, ...]
    num_learners: int
    threads: int | None = None
    max_restarts: int | None = 3
    open_s: float = 180.0
    linger_s: float = 30.0
    grace_s: float | None = None
    via: Via | None = None
    tell: Tell | None = None
    is_served: bool = False

    @property
    def learners(self) -> list[str]:
        """The learner ids l0..lN-1."""
        return [f"l{index}" for index in range(self.num_learners)]

    def syncer(self) -> Command:
        """Return the syncer's command."""
        log_path = self.run_dir / "syncer" / "log.txt"
        return Command(name=SYNCER, argv=self.syncer_argv, log_path=log_path, spare=spare.argv(self.syncer_argv))

    def learner(self, name: str, address: JoinAddress) -> Command:
        """Return a learner's command; the secret is in its environment, which other users cannot read."""
        folder = self.run_dir / "learners" / name
        dialled = self.via(name, address) if self.via else address
        env = {
            "DILOCO_JOIN": dialled.join_string(),
            "DILOCO_LEARNER": name,
            "DILOCO_RUN_DIR": str(self.run_dir),
            "PL_TRAINER_DEFAULT_ROOT_DIR": str(folder),  # Lightning uses it if the script sets none
            **(self.tell(address.run, name) if self.tell else {}),
        }
        if self.threads is not None or "OMP_NUM_THREADS" not in os.environ:
            env["OMP_NUM_THREADS"] = str(self.threads or max(1, cores_here() // self.num_learners))
        return Command(
            name=name,
            argv=self.learner_argv,
            log_path=self.log_of(name),
            env=env,
            until=SYNCER,
            done_path=folder / FINISHED,
        )

    def log_of(self, learner: str) -> Path:
        """Return the path of a learner's log."""
        return self.run_dir / "learners" / learner / "log.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The result of a run.

    Args:
        exit_code: 0 if every learner and the run finished; 128 + signal if interrupted; 2 if all learners were refused
            (exit code 2) before one took part; 1 otherwise.
        summary: the syncer's summary; None if it wrote none, or if all learners were refused.
    """

    exit_code: int
    summary: dict[str, Any] | None


def execute(
    plan: Plan,
    screen: Screen,
    interruption: Interruption,
    ask: Ask = asking,
    meddle: Meddle | None = None,
    *,
    fleet: AbstractContextManager[Processes] | None = None,
) -> Ended:
    """Run a plan to its end. Call it from the main thread only.

    Args:
        plan: the run.
        screen: display of the run.
        interruption: ends the run when this process gets a signal.
        ask: opens a connection for state requests.
        meddle: called ten times a second while learners train, with the processes and the latest state.
        fleet: runs the processes; None: they run on this machine.
    """
    summary_path = plan.run_dir / "summary.json"
    before = _stamp(summary_path)
    with fleet or Fleet(max_restarts=plan.max_restarts, say=screen.say) as processes:
        run = _Run(plan, processes, screen, interruption, meddle)
        if address := run.open():
            for name in plan.learners:
                processes.start(plan.learner(name, address))
            with ask(address, plan.run_dir / "join") as fetch, StatusFeed(fetch) as feed:
                run.train(feed)
                run.drain(feed)
                run.stop(feed)
    summary = summary_of(plan.run_dir) if _stamp(summary_path) != before else None
    if interruption:
        return Ended(exit_code=interruption.exit_code, summary=summary)
    if run.is_refused:
        return Ended(exit_code=2, summary=None)
    all_finished = address is not None and all(processes.outcome(name) == "finished" for name in run.learners)
    is_done = all_finished and summary is not None and summary["status"] == "finished"
    return Ended(exit_code=0 if is_done else 1, summary=summary)


class _Run:
    """The stages of one run."""

    def __init__(
        self, plan: Plan, fleet: Processes, screen: Screen, interruption: Interruption, meddle: Meddle | None
    ) -> None:
        self._plan = plan
        self._fleet = fleet
        self._screen = screen
        self._interruption = interruption
        self._meddle = meddle
        self.is_refused = False  # the command line or the configuration of all learners, before one took part
        self._echo = Echo({name: plan.log_of(name) for name in plan.learners}, screen.say)

    @property
    def learners(self) -> list[str]:
        """The learners that the run should have at the moment."""
        return [name for name in self._fleet.names if name != SYNCER]

    def open(self) -> JoinAddress | None:
        """Start the syncer and return its address, or None if it did not start."""
        join = self._plan.run_dir / "join"
        before = None if self._plan.is_served else _stamp(join)
        self._fleet.start(self._plan.syncer())
        deadline_s = time.monotonic() + self._plan.open_s
        self._wait(lambda: _stamp(join) != before or not self._is_served() or time.monotonic() > deadline_s)
        if self._interruption or not self._is_served():
            return None
        if _stamp(join) == before:
            log = self._plan.syncer().log_path
            self._screen.say(f"the syncer did not write {join} within {self._plan.open_s:g} s; see {log}")
            return None
        return read_join_file(join)

    def train(self, feed: StatusFeed) -> None:
        """Wait until the learners have finished or the syncer has given up."""
        self._wait(lambda: not self._are_training() or self._fleet.outcome(SYNCER) in _FAILED, feed)

    def drain(self, feed: StatusFeed) -> None:
        """Wait for the syncer to end by itself, if learners have finished or learners from elsewhere still use it."""
        if self._are_training() or self._interruption:
            return
        outcomes = {self._fleet.outcome(name) for name in self.learners}
        deadline_s = time.monotonic() + self._plan.linger_s
        if outcomes <= {"finished"} or outcomes <= {"refused"}:
            # Learners may end before the first answer of the syncer.
            self._wait(lambda: feed.latest is not None or not self._is_served() or time.monotonic() > deadline_s, feed)
            if self._is_unused(feed):
                self.is_refused = outcomes == {"refused"}
                if not self.is_refused:
                    self._screen.say(
                        "no learner took part in the run, so it cannot finish; "
                        'a script must `import lightning_diloco` and use Trainer(strategy="decoupled_diloco")'
                    )
                return
        if "finished" not in outcomes:
            deadline_s = time.monotonic()
        self._wait(lambda: not self._is_served() or (time.monotonic() > deadline_s and not self._is_used(feed)), feed)

    def stop(self, feed: StatusFeed) -> None:
        """Stop all processes that still run."""
        grace_s = self._grace_s
        if self._interruption.signal:
            self._screen.say(
                f"{self._interruption.signal.name}: ending the run; learners have {grace_s:g} s to send their last "
                "contributions and to write a checkpoint; a second signal ends it at once"
            )
        for names, within_s in ((self.learners, grace_s), ([SYNCER], self._stop_syncer_s)):
            self._fleet.stop(
                names,
                within_s=within_s,
                is_urgent=lambda: self._interruption.is_urgent,
                is_done=partial(_has_left, feed),
            )

    @property
    def _stop_syncer_s(self) -> float:
        """Seconds for the last snapshot of the syncer, or of a shard, which is as large as the previous one."""
        folders = (self._plan.run_dir / "syncer").rglob("snapshot")
        files = chain.from_iterable(folder.rglob("*") for folder in folders)
        return _STOP_SYNCER_S + sum(file.stat().st_size for file in files if file.is_file()) / _SNAPSHOT_BPS

    @property
    def _grace_s(self) -> float:
        if self._plan.grace_s is not None:
            return self._plan.grace_s
        return CTRL_C_GRACE_S if self._interruption.signal == signal.SIGINT else GRACE_S

    def _wait(self, done: Callable[[], bool], feed: StatusFeed | None = None) -> None:
        self._fleet.watch()
        while not self._interruption and not done():
            for name in self.learners:
                self._echo.follow(name, self._plan.log_of(name))
            self._echo.look()
            if feed is not None:
                self._screen.show(feed.latest, feed.problem if self._is_served() else None)
                if self._meddle is not None and self._are_training():
                    self._meddle(self._fleet, feed.latest)
            time.sleep(_TICK_S)
            self._fleet.watch()

    def _is_served(self) -> bool:
        return self._fleet.outcome(SYNCER) == "running"

    def _are_training(self) -> bool:
        return any(self._fleet.outcome(name) == "running" for name in self.learners)

    def _is_unused(self, feed: StatusFeed) -> bool:
        """Return whether no learner ever took part. In a short run, learners may join and leave between two polls."""
        if any(self._fleet.is_done(name) for name in self.learners):
            return False
        return feed.latest is not None and not (feed.latest["learners"] or feed.latest.get("versions"))

    def _is_used(self, feed: StatusFeed) -> bool:
        """Return whether learners from elsewhere take part."""
        present = [] if feed.latest is None else feed.latest["learners"]
        return any(it["phase"] not in _GONE and it["id"] not in self.learners for it in present)


def _has_left(feed: StatusFeed, learner: str) -> bool:
    """Return whether the syncer has received this learner's leave, and so all its contributions."""
    learners = [] if feed.latest is None else feed.latest["learners"]
    return any(it["id"] == learner and it["phase"] == "left" for it in learners)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a value that changes with every write, to tell a new file from one of an earlier syncer of the run."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
