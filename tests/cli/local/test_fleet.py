"""A fleet starts, restarts, gives up and stops its children."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_diloco.cli.local import fleet as fleet_module
from lightning_diloco.cli.local.fleet import Command, Fleet, describe_exit, describe_log, last_words
from tests.alive import is_running

SLEEP = "import time; time.sleep(60)"
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); {SLEEP}"
DEADLINE_S = 10.0


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-ISc", code)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(condition: Callable[[], bool], between: Callable[[], None] = lambda: None) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        between()
        time.sleep(0.005)


class Harness:
    def __init__(self, folder: Path, max_restarts: int = 0) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.fleet = Fleet(max_restarts=max_restarts, say=self.said.append)

    def command(self, code: str, name: str = "l0", **options: object) -> Command:
        return Command(name=name, argv=python(code), log_path=self.folder / name / "log.txt", **options)  # type: ignore[arg-type]

    def run(self, code: str, name: str = "l0") -> str:
        """Start a child, wait for its end, and return the messages about it."""
        with self.fleet:
            self.fleet.start(self.command(code, name))
            until(lambda: self.fleet.outcome(name) != "running", self.fleet.watch)
        return "\n".join(self.said)

    @contextmanager
    def ready(self, code: str) -> Iterator[Fleet]:
        """A fleet with one child that has printed "ready"."""
        with self.fleet:
            self.fleet.start(self.command(code))
            until(lambda: "ready" in self.log())
            yield self.fleet

    def log(self, name: str = "l0") -> str:
        return (self.folder / name / "log.txt").read_text()


def test_a_child_that_ends_with_zero_is_finished_and_not_started_again(tmp_path: Path) -> None:
    harness = Harness(tmp_path, max_restarts=3)
    assert harness.run("print('once')") == "l0 finished"
    assert harness.fleet.outcome("l0") == "finished"
    assert harness.log() == "once\n"


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_dying_child_is_restarted_up_to_the_limit(tmp_path: Path, max_restarts: int) -> None:
    harness = Harness(tmp_path, max_restarts)
    said = harness.run("print('try'); raise SystemExit(7)")
    assert harness.fleet.outcome("l0") == "gave up"
    assert harness.log() == "try\n" * (1 + max_restarts)
    assert said.count("l0 died (exit code 7: try); restart ") == max_restarts
    assert f"restarts used up: {max_restarts} of {max_restarts}" in said


def test_giving_up_shows_the_signal_and_the_end_of_the_log(tmp_path: Path) -> None:
    said = Harness(tmp_path).run("import os; print('last words', flush=True); os.kill(os.getpid(), 9)")
    assert "l0 died (signal SIGKILL)" in said
    assert "    last words\n" in said
    assert f"the whole log: {tmp_path / 'l0' / 'log.txt'}" in said


def test_a_child_with_a_wrong_command_line_is_not_restarted(tmp_path: Path) -> None:
    harness = Harness(tmp_path, max_restarts=3)
    said = harness.run("print('usage: ...'); raise SystemExit(2)")
    assert harness.log() == "usage: ...\n"
    assert "exit code 2" in said
    assert "    usage: ...\n" in said


def test_a_restart_after_a_preemption_does_not_count_towards_the_limit(tmp_path: Path) -> None:
    once = f"from pathlib import Path; p = Path({str(tmp_path / 'once')!r}); first = not p.exists(); p.touch(); "
    harness = Harness(tmp_path, max_restarts=0)
    said = harness.run(once + "raise SystemExit(143 if first else 0)")
    assert said == "l0 was preempted (SIGTERM) and left; it is restarted\nl0 finished"


@pytest.mark.parametrize(
    ("ends", "said"),
    [("raise SystemExit(7)", "after the end of its training; it is not started again"), (KILLED, "; restart 1 of 1")],
)
def test_a_child_that_fails_after_its_work_is_done_is_not_restarted(tmp_path: Path, ends: str, said: str) -> None:
    done = tmp_path / "done"
    harness = Harness(tmp_path, max_restarts=1)
    with harness.fleet as fleet:
        fleet.start(harness.command(f"open({str(done)!r}, 'w').close(); {ends}", done_path=done))
        until(lambda: fleet.outcome("l0") != "running", fleet.watch)
    assert fleet.outcome("l0") == "gave up"
    assert said in harness.said[0]


def test_a_done_file_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    (done := tmp_path / "done").touch()
    harness = Harness(tmp_path, max_restarts=1)
    with harness.fleet as fleet:
        fleet.start(harness.command("raise SystemExit(7)", done_path=done))
        until(lambda: fleet.outcome("l0") != "running", fleet.watch)
    assert harness.said[0] == "l0 died (exit code 7); restart 1 of 1"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_SPARE_AFTER_S", -1.0)


@pytest.mark.usefixtures("at_once")
def test_a_spare_takes_over_from_a_child_that_dies(tmp_path: Path) -> None:
    harness = Harness(tmp_path, max_restarts=1)
    log = str(tmp_path / "l0" / "log.txt")
    child = f"import time\nwhile 'ready' not in open({log!r}).read(): time.sleep(0.01)\nraise SystemExit(7)"
    ready = "import os, sys; print('ready', flush=True); sys.stdin.readline() and print('taken', os.getpid())"
    with harness.fleet as fleet:
        fleet.start(harness.command(child, spare=python(ready)))
        until(lambda: fleet.outcome("l0") != "running", fleet.watch)
    assert fleet.outcome("l0") == "finished"
    assert f"taken {fleet.pid('l0')}" in harness.log()
    assert harness.said == ["l0 died (exit code 7: ready); restart 1 of 1", "l0 finished"]


@pytest.mark.usefixtures("at_once")
def test_a_child_without_a_spare_is_started_normally(tmp_path: Path) -> None:
    harness = Harness(tmp_path, max_restarts=9)
    once, gone = str(tmp_path / "once"), str(tmp_path / "gone")
    child = (
        f"import os, time\nif os.path.exists({once!r}): raise SystemExit(0)\n"
        f"while not os.path.exists({gone!r}): time.sleep(0.01)\nopen({once!r}, 'w')\nraise SystemExit(7)"
    )
    with harness.fleet as fleet:
        fleet.start(harness.command(child, spare=python(f"open({gone!r}, 'w')")))
        until(lambda: fleet.outcome("l0") != "running", fleet.watch)
    assert fleet.outcome("l0") == "finished"


@pytest.mark.usefixtures("at_once")
def test_a_spare_ends_with_its_child(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    with harness.fleet as fleet:
        fleet.start(harness.command(SLEEP, spare=python(f"import os; print(os.getpid(), flush=True); {SLEEP}")))
        until(lambda: harness.log().endswith("\n"), fleet.watch)
        assert is_alive(int(harness.log()))
        fleet.stop(["l0"], within_s=DEADLINE_S)
        assert not is_alive(int(harness.log()))


def test_processes_that_a_dead_child_left_are_killed(tmp_path: Path) -> None:
    leaver = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-ISc', {SLEEP!r}]); "
        "print(child.pid); raise SystemExit(7)"
    )
    harness = Harness(tmp_path)
    harness.run(leaver)
    until(lambda: not is_running(int(harness.log())))


def test_stop_sends_sigterm_to_a_child(tmp_path: Path) -> None:
    obedient = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('asked'), sys.exit(0)))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    harness = Harness(tmp_path)
    with harness.ready(obedient) as fleet:
        pid = fleet.pid("l0")
        fleet.stop(["l0"], within_s=DEADLINE_S)
        assert not is_alive(pid)
        fleet.watch()
    assert fleet.outcome("l0") == "stopped"
    assert harness.log() == "ready\nasked\n"
    assert harness.said == []


def test_stop_kills_a_child_that_does_not_end(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    with harness.ready(STUBBORN) as fleet:
        pid = fleet.pid("l0")
        fleet.stop(["l0"], within_s=0.05)
        assert not is_alive(pid)
    assert "l0: still running 0.05 s after SIGTERM; killed" in harness.said


def test_stop_does_not_wait_when_no_time_is_left(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    asked = iter([False, False])
    with harness.ready(STUBBORN) as fleet:
        fleet.stop(["l0"], within_s=math.inf, is_urgent=lambda: next(asked, True))
    assert harness.said == ["l0: second signal; killed"]


def test_sigterm_goes_only_to_the_child_and_not_to_its_own_children(tmp_path: Path) -> None:
    parent = (
        "import signal, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-ISc', {SLEEP!r}])\n"
        "def end(*_):\n    print('alive' if child.poll() is None else 'dead', child.pid)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\nchild.wait()"
    )
    harness = Harness(tmp_path)
    with harness.ready(parent) as fleet:
        fleet.stop(["l0"], within_s=DEADLINE_S)
    _, said, pid = harness.log().split()
    assert said == "alive"
    until(lambda: not is_running(int(pid)))


def test_an_error_in_the_block_leaves_no_child(tmp_path: Path) -> None:
    harness = Harness(tmp_path)

    def fail() -> None:
        with harness.fleet as fleet:
            fleet.start(harness.command(SLEEP))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not is_alive(harness.fleet.pid("l0"))


def test_a_child_sees_the_environment_of_its_command_and_a_default_sigint(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        harness = Harness(tmp_path)
        code = "import os, signal; print(os.environ['SAID'], signal.getsignal(signal.SIGINT).__name__)"
        with harness.fleet as fleet:
            fleet.start(harness.command(code, env={"SAID": "hello"}))
            until(lambda: fleet.outcome("l0") != "running", fleet.watch)
    finally:
        signal.signal(signal.SIGINT, before)
    assert harness.log() == "hello default_int_handler\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_killed_parent_leaves_no_child(tmp_path: Path) -> None:
    argv = python(f"print('ready', flush=True); {SLEEP}")
    starter = f"""
import time
from pathlib import Path
from lightning_diloco.cli.local.fleet import Command, Fleet
fleet = Fleet(max_restarts=0, say=print)
fleet.start(Command(name="l0", argv={argv!r}, log_path=Path({str(tmp_path / "log")!r})))
print(fleet.pid("l0"), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        until(lambda: "ready" in (tmp_path / "log").read_text())
        process.kill()
    until(lambda: not is_running(pid))


@pytest.mark.parametrize(("code", "words"), [(3, "exit code 3"), (-15, "signal SIGTERM"), (-200, "signal 200")])
def test_an_exit_code_is_described(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_only_the_last_state_of_a_progress_bar_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(b"".join(b"line %d\n" % i for i in range(30)) + b"step 1\rstep 2\rstep 3\r\n")
    shown = describe_log(log, num_lines=2)
    assert "    line 29\n    step 3\n" in shown
    assert "line 28" not in shown
    assert "step 2" not in shown


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "Traceback (most recent call last):\n  File 'a.py'\nValueError: bad\n  shape (3, 4)\nor so",
            "ValueError: bad",
        ),
        (
            "Traceback (most recent call last):\n  x\nE: a\n\nTraceback (most recent call last):\n  y\na.b.C: d",
            "a.b.C: d",
        ),
        ("Traceback (most recent call last):\n  File 'a.py'\nKeyboardInterrupt\nwandb: synced", "KeyboardInterrupt"),
        ("killed by the scheduler", "killed by the scheduler"),
        ("", ""),
    ],
)
def test_the_last_words_of_a_process_are_its_exception(tmp_path: Path, said: str, words: str) -> None:
    log = tmp_path / "log.txt"
    log.write_text(said)
    assert last_words(log) == words


def test_the_output_of_an_earlier_process_is_not_reported_as_the_cause(tmp_path: Path) -> None:
    harness = Harness(tmp_path, max_restarts=1)
    log = harness.command("").log_path
    log.parent.mkdir()
    log.write_text("Traceback (most recent call last):\nValueError: of yesterday\n")
    said = harness.run("import os; os._exit(3)")
    assert said.startswith("l0 died (exit code 3); restart 1 of 1\n")
    assert "yesterday" not in said


def test_a_child_that_is_done_but_slow_to_exit_is_not_reported_as_killed(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    log = tmp_path / "l0" / "log.txt"
    with harness.fleet as fleet:
        fleet.start(harness.command(STUBBORN))
        until(lambda: log.exists() and "ready" in log.read_text())
        fleet.stop(["l0"], within_s=0.01, is_done=lambda name: name == "l0")
    assert harness.said == ["l0: left cleanly; the process was slow to exit and was killed"]
