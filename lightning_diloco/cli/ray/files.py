"""The files in RUN_DIR/ray, through which `diloco run` and the keepers on other machines communicate.

1. NAME.order is the order for a process. `diloco run` writes it, the keeper of the process follows it. It is written in
   place, because a network file system may show a replaced file late. A reader ignores an order that is half written.
2. NAME.events has one JSON object per line. Only keepers append to it. The keeper that wrote the last "began" is the
   newest one; older ones must leave. A learner of several hosts has one order and, for each host, a process with
   events of its own: l0 on its host 0, l0.1 on the next one (group.py).
3. `wanted` holds the number of learners that the run should have, and what is needed to check a new number.
   `diloco scale` writes it, `diloco run` follows it and removes it at its end. If it exists and no `diloco run` has
   claimed the directory, `diloco run` was killed, and another one may take its place (`left_alone`).

The files replace calls between actors, so the run can be watched and ended after the loss of the Ray head. Source: our
choice.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_diloco.cli.local.claim import is_claimed
from lightning_diloco.cli.local.feed import answers
from lightning_diloco.cli.local.fleet import Command
from lightning_diloco.storage.files import whole_lines
from lightning_diloco.transport.address import read_join_file

Wish = Literal["run", "leave", "kill"]
FOLDER = "ray"
_JOIN = "DILOCO_JOIN"
_NO_SLURM = {"SLURM_JOB_NAME": "interactive"}  # if Ray itself runs in a job, Lightning must not take its ranks from it


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Order to a keeper: the process to run.

    Args:
        words: arguments of Python; each machine uses its own interpreter.
        env: variables added to the environment of the machine.
        is_joining: whether it also gets DILOCO_JOIN, read from RUN_DIR/join at each start, because the syncer may move.
        log_path: see `Command`.
        done_path: see `Command`.
        cwd: working directory.
        max_restarts: maximum number of restarts; None for no limit.
        known_as: name of the actor in Ray, on host 0.
        wish: run; leave in good order within `within_s`; or kill at once.
        within_s: time to leave.
        num_hosts: number of hosts of the process.
        since: size of host 0's events before this order.
    """

    words: tuple[str, ...]
    env: Mapping[str, str]
    is_joining: bool
    log_path: str
    done_path: str | None
    cwd: str
    max_restarts: int | None
    known_as: str
    wish: Wish = "run"
    within_s: float = 0.0
    num_hosts: int = 1
    since: int = 0

    @classmethod
    def of(cls, command: Command, max_restarts: int | None, known_as: str) -> Order:
        """Return the order to run this command in the current directory."""
        python, *words = command.argv
        assert python == sys.executable, command.argv
        return cls(
            words=tuple(words),
            env={name: value for name, value in command.env.items() if name != _JOIN},
            is_joining=_JOIN in command.env,
            log_path=str(command.log_path),
            done_path=None if command.done_path is None else str(command.done_path),
            cwd=str(Path.cwd()),
            max_restarts=max_restarts,
            known_as=known_as,
        )

    def command(self, name: str, run_dir: Path, host: str, meet: Callable[[], Mapping[str, str]]) -> Command:
        """Return the command on this machine.

        Args:
            name: name of the process; see `host_names`.
            run_dir: RUN_DIR.
            host: name or address of this machine for other machines.
            meet: returns more variables; called at each start, which it may delay.
        """
        (_, rank), log_path = host_of(name), Path(self.log_path)

        def fresh() -> dict[str, str]:
            met = meet()
            return {**met, **({_JOIN: (run_dir / "join").read_text("utf-8").strip()} if self.is_joining else {})}

        return Command(
            name=name,
            argv=(sys.executable, *_with_port(self.words, run_dir, host)),
            log_path=log_path.with_suffix(f".{rank}{log_path.suffix}") if rank else log_path,
            env={**self.env, "DILOCO_HOST": host, "DILOCO_NUM_HOSTS": str(self.num_hosts), **_NO_SLURM},
            fresh=fresh,
            done_path=None if self.done_path is None or rank else Path(self.done_path),
        )


def host_names(name: str, num_hosts: int) -> list[str]:
    """Return the names of a learner's processes, one for each host: l0, l0.1, l0.2."""
    return [name, *(f"{name}.{rank}" for rank in range(1, num_hosts))]


def host_of(name: str) -> tuple[str, int]:
    """Return the name of the learner and the number of its host, from a name of `host_names`."""
    learner, _, rank = name.partition(".")
    return learner, int(rank or 0)


class Desk:
    """The files of one process.

    Args:
        run_dir: RUN_DIR.
        name: name of the process.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        folder = run_dir / FOLDER
        self._order, self._events = folder / f"{host_of(name)[0]}.order", folder / f"{name}.events"
        self.log_path = folder / f"{name}.txt"

    @staticmethod
    def names(run_dir: Path) -> list[str]:
        """Return the names of all learners, and of the syncer, that have got an order."""
        return [path.stem for path in (run_dir / FOLDER).glob("*.order")]

    def order(self) -> Order | None:
        """Return the order; None if there is none, it is half written, or the disk does not answer."""
        try:
            told = json.loads(self._order.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return Order(**{**told, "words": tuple(told["words"])})

    def write_order(self, order: Order) -> None:
        """Write the order."""
        write_in_place(self._order, json.dumps(asdict(order)))

    def tell(self, keeper: str, event: str, text: str) -> None:
        """Append an event of a keeper."""
        line = json.dumps({"keeper": keeper, "event": event, "text": text}) + "\n"
        opened = os.open(self._events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(opened, line.encode())
        finally:
            os.close(opened)

    @property
    def num_bytes(self) -> int:
        """Size of all events so far."""
        return self._events.stat().st_size if self._events.exists() else 0

    def events(self, start: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return the events from byte `start`, and the byte at which the next one begins; none if there is no file."""
        try:
            whole = list(whole_lines(self._events, start))
        except OSError:  # or a network file system does not answer
            return [], start
        return [json.loads(line) for line in whole], start + sum(map(len, whole))

    def newest(self) -> str | None:
        """Return the mark of the newest keeper; None if there was none."""
        told, _ = self.events()
        return next((it["keeper"] for it in reversed(told) if it["event"] == "began"), None)

    def ended(self, keeper: str | None) -> str | None:
        """Return the outcome that this keeper has reported; None if it has reported none."""
        told, _ = self.events()
        return next((it["text"] for it in told if it["keeper"] == keeper and it["event"] == "ended"), None)


def places(run_dir: Path) -> dict[str, str]:
    """Return where each process of a run is, or how it ended; empty if the run is not on a cluster."""
    found = {}
    for name in sorted(Desk.names(run_dir)):
        order = Desk(run_dir, name).order()
        for host in host_names(name, 1 if order is None else order.num_hosts):
            found[host] = _place(Desk(run_dir, host))
    return found


def _place(desk: Desk) -> str:
    if (keeper := desk.newest()) is None:
        return "waits for a node"
    if (outcome := desk.ended(keeper)) is not None:
        return outcome
    told, _ = desk.events()
    last = {it["event"]: it["text"] for it in told}
    return f"on {last['began']}" + (f" (last message: {last['said']})" if "said" in last else "")


@dataclass(frozen=True, slots=True)
class Wants:
    """The content of `wanted`.

    Args:
        num_learners: number of learners that the run should have.
        address: address of the Ray cluster.
        needs: resources of a learner on each of its hosts.
        num_hosts: number of hosts of a learner.
        auth_mode: RAY_AUTH_MODE of `diloco run`, which Ray sets when it starts a cluster of this machine; None: unset.
    """

    num_learners: int
    address: str
    needs: Mapping[str, float]
    num_hosts: int = 1
    auth_mode: str | None = None

    def authenticate(self) -> None:
        """Set RAY_AUTH_MODE as `diloco run` has it; before Ray is imported."""
        if self.auth_mode is not None:
            os.environ.setdefault("RAY_AUTH_MODE", self.auth_mode)


class Wanted:
    """The file with the wanted number of learners.

    Args:
        run_dir: RUN_DIR.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FOLDER / "wanted"

    def write(self, wants: Wants) -> None:
        """Write the file."""
        write_in_place(self._path, json.dumps(asdict(wants)))

    def read(self) -> Wants | None:
        """Return the content; None if there is none, or it is half written."""
        try:
            return Wants(**json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def left_alone(run_dir: Path) -> Wants | None:
    """Return the `Wants` of a run whose `diloco run` was killed but whose syncer runs; None if there is none."""
    wants, join = Wanted(run_dir).read(), run_dir / "join"
    if wants is None or is_claimed(run_dir) or not join.exists():
        return None
    return wants if answers(read_join_file(join), while_restoring=True) else None


def _with_port(words: tuple[str, ...], run_dir: Path, host: str) -> list[str]:
    """Give `--listen` ADDRESS:0 a port that stays the same while the syncer is on this machine.

    Otherwise, a learner that starts while the syncer is away would dial an address that is never used again.
    """
    found = list(words)
    if "--listen" in found and found[at := found.index("--listen") + 1].endswith(":0"):
        join = run_dir / "join"
        before = read_join_file(join) if join.exists() else None
        if before is not None and before.host in (host, "127.0.0.1"):
            port = before.port
        else:
            with socket.create_server(("", 0)) as free:
                port = free.getsockname()[1]
        found[at] = f"{found[at].removesuffix(':0')}:{port}"
    return found


def make_folder(run_dir: Path) -> None:
    """Create RUN_DIR/ray."""
    (run_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)


def write_in_place(path: Path, text: str) -> None:
    """Write a short text into a file that may exist."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        content = text.encode()
        os.pwrite(opened, content, 0)
        os.ftruncate(opened, len(content))
    finally:
        os.close(opened)
