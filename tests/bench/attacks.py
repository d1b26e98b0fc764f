"""What attacks do to a live run: `python -m tests.bench.attacks`.

1. A syncer and three honest learners are real processes. The attacks are those of `tests/attacks`; they come from this
   process, over the same TLS connections that learners use, one after another.
2. After each attack, the run is checked from outside: the syncer answers, rounds go on, no honest learner has lapsed,
   was refused or is in quarantine, and the anchors stay within the range of the targets.
3. Control: between attacks, nothing is sent for a while. The steps of honest learners in both phases are compared.
4. The check has a control, too: a suspended honest learner must count as an effect.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_diloco.errors import DiLoCoError
from lightning_diloco.syncer.replay import replay
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.flight import FlightConnection
from tests.attacks import contributions, files, wire
from tests.bench import report
from tests.e2e.conftest import Processes, until
from tests.fuzz.target import Peer
from tests.resident import forget_peak, resident_at_most, resident_now

HONEST = ("ada", "ben", "cho")
QUIET_S, LOOK_S = 2.0, 6.0
NUM_STRANGERS = 300
MAX_GROWTH, MIN_SPEED = 0.10, 0.80
BLAMED = ("refused", "quarantine", "rejected")


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Args:
        name: for the table.
        needs_token: whether it comes from a learner of the run.
        launch: runs the attack on an address, as a learner of this name.
    """

    name: str
    needs_token: bool
    launch: Callable[[JoinAddress, str], object]


def _held(hold: Callable[..., Any]) -> Callable[[JoinAddress, str], None]:
    def launch(address: JoinAddress, name: str) -> None:
        with hold(address, NUM_STRANGERS):
            time.sleep(QUIET_S)

    return launch


def _joined(attack: Callable[[Any], object], kind: type[Peer] = Peer) -> Callable[[JoinAddress, str], object]:
    def launch(address: JoinAddress, name: str) -> object:
        peer = kind(FlightConnection(address), name)
        peer.join()
        return attack(peer)

    return launch


def _busy(attack: Callable[[Any], object]) -> Callable[[JoinAddress, str], object]:
    return _joined(attack, contributions.Contributor)


ATTACKS = (
    Attack("4 calls of 200 MiB", False, lambda address, _: wire.large_calls(address)),
    Attack(f"{NUM_STRANGERS} idle connections", False, _held(wire.idle_sockets)),
    Attack(f"{NUM_STRANGERS} handshakes that stop", False, _held(wire.unfinished_handshakes)),
    Attack(f"{NUM_STRANGERS} calls that stop", False, _held(wire.unfinished_calls)),
    Attack("a batch that inflates to 256 MiB", True, lambda a, _: wire.compressed_upload(a, num_bytes=256 << 20)),
    Attack("calls that nobody makes", True, lambda address, _: wire.odd_calls(address)),
    Attack("a flood of messages", True, _joined(lambda peer: wire.flood(peer, num_calls=400))),
    Attack("sessions that do not exist", True, _joined(lambda peer: wire.made_up_sessions(peer, 400))),
    Attack("control characters", True, _joined(lambda peer: peer.say(*files.odd_words(4)))),
    *(Attack(name.replace("_", " "), True, _busy(attack)) for name, attack in contributions.ATTACKS.items()),
)


@dataclass(slots=True)
class Launch:
    """Runs one attack when called.

    Attributes:
        error: the error that ended it, if any.
    """

    attack: Attack
    address: JoinAddress
    name: str
    error: str = ""

    def __call__(self) -> None:
        try:
            self.attack.launch(self.address, self.name)
        except (DiLoCoError, AssertionError) as error:
            self.error = type(error).__name__


class Watch:
    """Checks a run from outside.

    Args:
        processes: of the run.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def honest(self, status: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return (learner for learner in status["learners"] if learner["id"] in HONEST)

    def effect(self) -> str | None:
        """Return what is wrong with the run; None if nothing is."""
        began_s = time.monotonic()
        try:
            before = self._processes.status()
            while (now := self._processes.status())["num_commits"] < before["num_commits"] + 4:
                if time.monotonic() > began_s + LOOK_S:
                    return "rounds do not go on"
                time.sleep(0.05)
        except (DiLoCoError, AssertionError) as error:
            return f"the syncer does not answer: {type(error).__name__}"
        hurt = [learner["id"] for learner in self.honest(now) if learner["phase"] != "stepping"]
        blamed = [learner["id"] for learner in self.honest(now) if learner["num_refused"] or learner["quarantined"]]
        if hurt or blamed or len(list(self.honest(now))) < len(HONEST):
            return f"honest learners: {hurt} do not step, {blamed} are blamed"
        return None

    def steps(self) -> int:
        return sum(int(learner["step"]) for learner in self.honest(self._processes.status()))

    def named(self, name: str) -> str | None:
        """Return the fate of this attacker according to the events."""
        told = [e["event"] for e in self._processes.status()["recent"] if e.get("learner") == name]
        return next((event for event in BLAMED[::-1] if event in told), None)


def run(root: Path, attacks: Sequence[Attack] = ATTACKS) -> dict[str, Any]:
    """Run all attacks; return a row for each, and the checks."""
    processes = Processes(root)
    try:
        return _run(processes, attacks)
    finally:
        processes.kill_all()


def _run(processes: Processes, attacks: Sequence[Attack]) -> dict[str, Any]:
    syncer = processes.syncer(len(HONEST), record_contributions=True)
    learners = [processes.learner(name) for name in HONEST]
    processes.until_commits(40)
    watch = Watch(processes)
    assert watch.effect() is None
    memory, rows, quiet, loud = resident_now(syncer.pid), [], [], []
    for number, attack in enumerate(attacks):
        quiet.append(_speed(watch, lambda: time.sleep(QUIET_S)))
        launch = Launch(attack, processes.address, f"mad{number}")
        forget_peak(syncer.pid)
        began_s = time.monotonic()
        loud.append(_speed(watch, launch))
        took_s, effect = time.monotonic() - began_s, watch.effect()
        rows.append(
            {
                "run": attack.name,
                "token": "yes" if attack.needs_token else "no",
                "seconds": round(took_s, 1),
                "syncer [MiB]": f"{memory / 2**20:.0f}, at most {resident_at_most(syncer.pid) / 2**20:.0f}",
                "its learner": watch.named(launch.name) or launch.error,
                "effect": effect or "none",
            }
        )
    os.kill(learners[0].pid, signal.SIGSTOP)
    time.sleep(2 * QUIET_S)
    control = watch.effect()
    os.kill(learners[0].pid, signal.SIGCONT)
    until(lambda: watch.effect() is None, "the stopped learner", processes)
    after = resident_now(syncer.pid)
    processes.stop_file.touch()
    for learner in learners:
        processes.end(learner)
    return _checked(rows, processes, control, memory=(memory, after), speed=(quiet, loud))


def _speed(watch: Watch, act: Callable[[], object]) -> float:
    """Return the steps per second of the honest learners in this time."""
    began_s, before = time.monotonic(), watch.steps()
    act()
    return (watch.steps() - before) / (time.monotonic() - began_s)


def _checked(
    rows: list[dict[str, Any]],
    processes: Processes,
    control: str | None,
    *,
    memory: tuple[int, int],
    speed: tuple[Sequence[float], Sequence[float]],
) -> dict[str, Any]:
    summary = until(lambda: (processes.run_dir / "summary.json").exists() and processes.summary(), "the summary")
    hurt = [row["run"] for row in rows if row["effect"] != "none"]
    growth, left = memory[1] / memory[0] - 1, statistics.median(speed[1]) / statistics.median(speed[0])
    try:
        level = replay(processes.run_dir).level
    except DiLoCoError as error:
        level = f"nothing: {error}"
    checks = {
        f"{len(rows)} attacks, {len(hurt)} with an effect": not hurt,
        "the ledger is exact": bool(summary["ledger_exact"]),
        f"the run is computed again bit for bit, from {level}": level == "merges",
        f"memory of the syncer {growth:+.0%} afterwards, at most {MAX_GROWTH:+.0%}": growth <= MAX_GROWTH,
        f"honest learners make {left:.2f} of their steps meanwhile, at least {MIN_SPEED:.2f}": left >= MIN_SPEED,
        f"control: a learner that is stopped is an effect ({control})": control is not None,
    }
    return {"rows": rows, "checks": checks}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and store; return 1 if a check fails."""
    args = report.options(__doc__).parse_args(argv)
    with tempfile.TemporaryDirectory() as root:
        return report.conclude(args.out, **run(Path(root)))


if __name__ == "__main__":
    raise SystemExit(main())
