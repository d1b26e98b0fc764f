"""Supervisor of child processes: starts, watches, restarts and stops them.

1. Each child runs in its own session. Ctrl-C at the terminal reaches only this process, which decides the order of
   shutdown.
2. Before a restart, the remaining processes of the dead child's process group are killed.
3. No child outlives this process. Leaving the `with` block ends the children. If this process is killed, the operating
   system kills them (leash.py).
4. A child with exit code 0 (finished) or 2 (a wrong command line, as in argparse, jsonargparse and Python) is not
   restarted. After all other exits it is restarted. Exit code 143 means that a learner left cleanly after SIGTERM; this
   restart does not count towards the limit.
5. `until=X`: the child is not restarted after X has finished. If a signal ends it after that, it counts as finished,
   because no work is lost. A child that has written `done_path` and fails by itself afterwards is not restarted,
   because it would fail at the same place again.
6. SIGTERM goes only to the child, which stops its own children. SIGKILL goes to the whole process group.
7. A child with `spare` has a second process that waits on its stdin for a line, and then takes over.

Rules and bounds are our choice.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

Outcome = Literal["running", "finished", "gave up", "refused", "stopped"]

_LEASH = str(Path(__file__).with_name("leash.py"))
_USAGE_EXIT_CODE = 2
_PREEMPTED_EXIT_CODE = 128 + signal.SIGTERM
_POLL_S = 0.02
_SPARE_AFTER_S = 2.0  # the child itself starts first
_TAIL_BYTES = 1 << 16
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: |$)")  # follows the indented frames of a traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The command of one child.

    Args:
        name: the child's name, unique in its fleet.
        argv: program and arguments.
        log_path: file to which stdout and stderr are appended; its folder is created.
        env: variables added to this process's environment.
        fresh: returns more variables; called at each start.
        until: name of a child; after it has finished, this one is not restarted.
        done_path: file that the child writes when its work is done; removed when it is started. None for no such file.
        spare: program and arguments of a process that becomes this child when it reads a line; empty for none.
    """

    name: str
    argv: tuple[str, ...]
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    fresh: Callable[[], Mapping[str, str]] = dict
    until: str | None = None
    done_path: Path | None = None
    spare: tuple[str, ...] = ()


@dataclass(slots=True)
class _Child:
    command: Command
    process: subprocess.Popen[bytes]
    num_restarts: int = 0
    outcome: Outcome = "running"
    spare: subprocess.Popen[bytes] | None = None
    log_bytes: int = 0  # size of the log at its start; earlier processes wrote that part
    started_s: float = field(default_factory=time.monotonic)

    @property
    def is_done(self) -> bool:
        """Whether it has written `done_path`. It may continue with work that does not affect other children."""
        return self.command.done_path is not None and self.command.done_path.exists()

    @property
    def has_finished(self) -> bool:
        """Whether it has exited with code 0, even if `watch` has not run since."""
        return self.outcome == "finished" or (self.outcome == "running" and self.process.poll() == 0)


class Fleet:
    """The children of one run. Use it from the main thread only (see leash.py).

    Args:
        max_restarts: maximum number of restarts per child; None for no limit.
        say: called with messages, in whole lines.
    """

    def __init__(self, *, max_restarts: int | None, say: Callable[[str], None]) -> None:
        self._max_restarts = max_restarts
        self._say = say
        self._children: dict[str, _Child] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop(list(self._children), within_s=2.0)

    @property
    def names(self) -> list[str]:
        """Names of the children."""
        return list(self._children)

    def start(self, command: Command) -> None:
        """Start one child."""
        if command.done_path is not None:
            command.done_path.unlink(missing_ok=True)
        log_bytes = command.log_path.stat().st_size if command.log_path.exists() else 0
        self._children[command.name] = _Child(command, _spawn(command, command.argv), log_bytes=log_bytes)

    def watch(self) -> None:
        """Check every child once; restart dead ones, or report why not. Does not block."""
        for child in self._children.values():
            if child.outcome == "running" and child.process.poll() is not None:
                _signal_group(child, signal.SIGKILL)
                self._bury(child, child.process.returncode)
            _keep_spare(child)

    def outcome(self, name: str) -> Outcome:
        """Return the state of a child as of the last `watch` or `stop`."""
        return self._children[name].outcome

    def is_done(self, name: str) -> bool:
        """Return whether a child has written its `done_path`."""
        return self._children[name].is_done

    def pid(self, name: str) -> int:
        """Return the current process id, and process group id, of a child."""
        return self._children[name].process.pid

    def stop(
        self,
        names: Iterable[str],
        *,
        within_s: float,
        is_urgent: Callable[[], bool] = lambda: False,
        is_done: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Stop children with SIGTERM, kill those still running after `within_s`, and return once all are dead.

        Args:
            names: names of the children.
            within_s: time they may take.
            is_urgent: returns whether they must be killed at once.
            is_done: returns whether the child of this name has completed its work and is only slow to exit.
        """
        children = [child for name in names if (child := self._children[name]).outcome == "running"]
        for child in children:
            child.outcome = "stopped"
            child.process.terminate()
        deadline_s = time.monotonic() + within_s
        while (
            any(child.process.poll() is None for child in children)
            and time.monotonic() < deadline_s
            and not is_urgent()
        ):
            time.sleep(_POLL_S)
        late = [child.command.name for child in children if child.process.poll() is None]
        if slow := [name for name in late if is_done(name)]:
            self._say(f"{', '.join(slow)}: left cleanly; the process was slow to exit and was killed")
        if late := [name for name in late if name not in slow]:
            why = "second signal" if is_urgent() else f"still running {within_s:g} s after SIGTERM"
            self._say(f"{', '.join(late)}: {why}; killed")
        for child in children:
            _signal_group(child, signal.SIGKILL)
            child.process.wait()
            _keep_spare(child)

    def _bury(self, child: _Child, code: int) -> None:
        name, how = child.command.name, describe_exit(code)
        if code == 0:
            child.outcome = "finished"
            self._say(f"{name} finished")
        elif code == _USAGE_EXIT_CODE:
            self._give_up(
                child, f"{name} ended with {how}: its command line or configuration is wrong, so it is not restarted"
            )
            child.outcome = "refused"
        elif child.command.until is not None and self._children[child.command.until].has_finished:
            self._bury_late(child, code, f"{name} died ({how}) after the end of {child.command.until}")
        elif child.is_done and code > 0 and code != _PREEMPTED_EXIT_CODE:
            self._give_up(child, f"{name} died ({how}) after the end of its training; it is not started again")
        elif code == _PREEMPTED_EXIT_CODE:
            self._say(f"{name} was preempted (SIGTERM) and left; it is restarted")
            _start_again(child)
        elif child.num_restarts == self._max_restarts:
            self._give_up(child, f"{name} died ({how}); restarts used up: {child.num_restarts} of {self._max_restarts}")
        else:
            child.num_restarts += 1
            # After a signal, the last line of the log is not the cause.
            why = f": {reason}" if code > 0 and (reason := last_words(child.command.log_path, child.log_bytes)) else ""
            of = "" if self._max_restarts is None else f" of {self._max_restarts}"
            self._say(f"{name} died ({how}{why}); restart {child.num_restarts}{of}")
            _start_again(child)

    def _bury_late(self, child: _Child, code: int, what: str) -> None:
        if code < 0 or code == _PREEMPTED_EXIT_CODE:
            child.outcome = "finished"
            self._say(f"{what}; it is not restarted")
        else:
            self._give_up(child, f"{what}; it is not started again")

    def _give_up(self, child: _Child, why: str) -> None:
        child.outcome = "gave up"
        self._say(f"{why}\n{describe_log(child.command.log_path, since_bytes=child.log_bytes)}")


def describe_exit(code: int) -> str:
    """Describe a `Popen.returncode`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def describe_log(path: Path, *, num_lines: int = 15, since_bytes: int = 0) -> str:
    """Return the last lines of a log, indented, and its path."""
    tail = "".join(f"    {line}\n" for line in last_lines(path, num_lines, since_bytes))
    return f"  its last lines:\n{tail}  the whole log: {path}"


def last_words(path: Path, since_bytes: int = 0) -> str:
    """Return the exception and the first line of its message from the last traceback in a log, else the last line.

    A message can have several lines, and other output can follow the traceback.
    """
    lines = last_lines(path, _TAIL_BYTES, since_bytes)
    tracebacks = [k for k, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    raised = [line for line in lines[tracebacks[-1] + 1 :] if _EXCEPTION.match(line)] if tracebacks else []
    return next(iter(raised or lines[-1:]), "").strip()


def last_lines(path: Path, num_lines: int, since_bytes: int = 0) -> list[str]:
    """Return up to `num_lines` last lines of a log, without its first `since_bytes` bytes."""
    with path.open("rb") as log:
        log.seek(max(since_bytes, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = log.read().decode(errors="replace")
    # A progress bar redraws its line after "\r"; keep only the last state.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")] if text.strip() else []
    return lines[-num_lines:]


def _start_again(child: _Child) -> None:
    spare, child.spare, child.started_s = child.spare, None, time.monotonic()
    child.log_bytes = child.command.log_path.stat().st_size
    is_ready = spare is not None and spare.poll() is None
    if spare is not None:
        _close_stdin(spare, b"\n")
    child.process = spare if spare is not None and is_ready else _spawn(child.command, child.command.argv)


def _keep_spare(child: _Child) -> None:
    """Keep a spare for a running child, and none for any other. A spare that died is not replaced."""
    if child.outcome != "running":
        if child.spare is not None:
            _close_stdin(child.spare)
            child.spare.kill()
            child.spare.wait()
            child.spare = None
    elif child.command.spare and child.spare is None and time.monotonic() > child.started_s + _SPARE_AFTER_S:
        child.spare = _spawn(child.command, child.command.spare, stdin=subprocess.PIPE)


def _close_stdin(process: subprocess.Popen[bytes], last_words: bytes = b"") -> None:
    with contextlib.suppress(BrokenPipeError):  # the process has just died
        assert process.stdin is not None
        process.stdin.write(last_words)
        process.stdin.close()


def _spawn(command: Command, argv: Sequence[str], *, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    command.log_path.parent.mkdir(parents=True, exist_ok=True)
    with open(command.log_path, "ab", opener=_private) as log:
        return subprocess.Popen(
            (sys.executable, "-IS", _LEASH, str(os.getpid()), *argv),
            stdin=stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **command.env, **command.fresh()},
            start_new_session=True,
        )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _signal_group(child: _Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
        os.killpg(child.process.pid, number)
