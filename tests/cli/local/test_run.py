"""A local run with stand-ins for syncer and learners: order, exit codes, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_diloco.cli.local.display import Screen
from lightning_diloco.cli.local.feed import Fetch
from lightning_diloco.cli.local.interruption import CTRL_C_GRACE_S, GRACE_S, Interruption
from lightning_diloco.cli.local.run import Ended, Plan, execute
from lightning_diloco.transport.address import JoinAddress

JOIN = "diloco://127.0.0.1:1/run#secret," + "0" * 64
SYNCER = """
import json, os, signal, sys, time
from pathlib import Path
run_dir, num_learners = Path(sys.argv[1]), int(sys.argv[2])
def end(*_):
    (run_dir / "summary.json").write_text(json.dumps({"status": "interrupted"}))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
(run_dir / "pid-syncer").write_text(str(os.getpid()))
(run_dir / "join.tmp").write_text("diloco://127.0.0.1:1/run#secret," + "0" * 64)
os.replace(run_dir / "join.tmp", run_dir / "join")
while len(list(run_dir.glob("done-*"))) < num_learners:
    time.sleep(0.01)
(run_dir / "summary.json").write_text(json.dumps({"status": "finished"}))
"""
LEARNER = """
import os
from pathlib import Path
run_dir = Path(os.environ["DILOCO_RUN_DIR"])
name = os.environ["DILOCO_LEARNER"]
(run_dir / f"pid-{name}").write_text(str(os.getpid()))
"""
FINISH = LEARNER + "(run_dir / f'done-{name}').touch()"
SLEEP = LEARNER + "import time; time.sleep(60)"
# A process that has ended has no program, whether or not its parent has reaped it.
OUTLIVE = (
    FINISH
    + """
if name == 'l1':
    import time
    program = '/proc/' + (run_dir / 'pid-syncer').read_text() + '/exe'
    while os.path.exists(program): time.sleep(0.01)
    """
)
STUBBORN = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
)


def python(code: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-ISc", code, *words)


def plan(run_dir: Path, learner: str, syncer: str = SYNCER, **options: Any) -> Plan:
    options = {"num_learners": 2, "max_restarts": 0, "linger_s": 0.0, **options}
    argv = python(syncer, str(run_dir), str(options["num_learners"]))
    return Plan(run_dir=run_dir, syncer_argv=argv, learner_argv=python(learner), **options)


def run(this: Plan, learners: list[dict[str, Any]] | None = None, answers_after: str = "") -> tuple[Ended, str]:
    """Execute a plan; the fake syncer knows these learners, and answers once this text is printed."""
    said = io.StringIO()

    def fetch() -> dict[str, Any]:
        while answers_after not in said.getvalue():
            time.sleep(0.01)
        return {"learners": learners or []}

    @contextmanager
    def ask(address: JoinAddress, join: Path) -> Iterator[Fetch]:
        assert address.join_string() == JOIN
        yield fetch

    screen = Screen(Console(file=said), live=False, clock=lambda: 0.0, period_s=1e9)
    screen.show(None, "draws nothing from now on")
    with Interruption() as interruption:
        ended = execute(this, screen, interruption, ask)
    return ended, said.getvalue()


def test_a_run_whose_learners_all_finish_ends_with_zero(tmp_path: Path) -> None:
    ended, said = run(plan(tmp_path, FINISH, linger_s=10.0), [{"id": "l0", "phase": "left"}])
    assert ended == Ended(exit_code=0, summary={"status": "finished"})
    assert "l0 finished" in said
    assert "l1 finished" in said
    assert "secret" not in said


def test_a_learner_that_gives_up_lets_the_others_finish_but_the_run_fails(tmp_path: Path) -> None:
    ended, said = run(plan(tmp_path, FINISH + "\nassert name == 'l0', 'not l0'"), [{"id": "l0", "phase": "lapsed"}])
    assert ended.exit_code == 1
    assert "l0 finished" in said
    assert "l1 died (exit code 1)" in said
    assert "AssertionError: not l0" in said


@pytest.mark.parametrize(("dies", "exit_code"), [("os.kill(os.getpid(), 9)", 0), ("raise ValueError", 1)])
def test_a_learner_that_dies_after_the_end_of_the_run_is_not_restarted(
    tmp_path: Path, dies: str, exit_code: int
) -> None:
    ended, said = run(plan(tmp_path, OUTLIVE + dies, linger_s=10.0, max_restarts=9), [{"id": "l0", "phase": "left"}])
    assert (ended.exit_code, ended.summary) == (exit_code, {"status": "finished"})
    assert "after the end of syncer" in said
    assert "restart 1" not in said


def test_a_run_ends_if_its_scripts_did_not_take_part(tmp_path: Path) -> None:
    ended, said = run(plan(tmp_path, LEARNER, linger_s=1e9))
    assert ended == Ended(exit_code=1, summary={"status": "interrupted"})
    assert "no learner took part" in said


def test_scripts_that_end_before_the_first_answer_of_the_syncer_did_not_take_part(tmp_path: Path) -> None:
    only = plan(tmp_path, LEARNER, num_learners=1, linger_s=10.0)
    ended, said = run(only, answers_after="l0 finished")
    assert ended.exit_code == 1
    assert "no learner took part" in said


def test_a_run_whose_learners_are_all_refused_is_refused_unless_one_took_part(tmp_path: Path) -> None:
    this = plan(tmp_path, "raise SystemExit(2)", linger_s=1e9)
    ended, said = run(this)
    assert ended == Ended(exit_code=2, summary=None)
    assert "its command line or configuration is wrong" in said
    ended, _ = run(this, [{"id": "l0", "phase": "lapsed"}])
    assert ended == Ended(exit_code=1, summary={"status": "interrupted"})


def test_learners_that_joined_and_left_between_two_polls_took_part(tmp_path: Path) -> None:
    trained = LEARNER + "(run_dir / 'learners' / name / 'finished').touch(); (run_dir / f'done-{name}').touch()"
    ended, said = run(plan(tmp_path, trained, linger_s=10.0))  # the syncer answered before any learner joined
    assert ended == Ended(exit_code=0, summary={"status": "finished"})
    assert "no learner took part" not in said


def test_a_run_whose_learners_all_failed_does_not_wait_for_the_summary(tmp_path: Path) -> None:
    ended, _ = run(plan(tmp_path, LEARNER + "raise ValueError", linger_s=1e9), [{"id": "l0", "phase": "stepping"}])
    assert ended == Ended(exit_code=1, summary={"status": "interrupted"})


def test_learners_from_elsewhere_keep_the_run_going(tmp_path: Path) -> None:
    others = [{"id": "ada", "phase": "stepping"}]
    joins = SYNCER.replace("time.sleep(0.01)", "time.sleep(0.01); (run_dir / 'done-ada').touch()")
    this = plan(tmp_path, LEARNER + "if name == 'l0': raise ValueError\n(run_dir / 'done-l1').touch()", syncer=joins)
    ended, _ = run(this, others)
    assert ended == Ended(exit_code=1, summary={"status": "finished"})


def test_a_syncer_that_does_not_start_is_shown_with_its_log(tmp_path: Path) -> None:
    ended, said = run(plan(tmp_path, FINISH, syncer="raise SystemExit('the disk is full')"))
    assert ended == Ended(exit_code=1, summary=None)
    assert "    the disk is full" in said
    assert not list(tmp_path.glob("learners/*"))


def test_the_wait_for_a_join_file_is_limited(tmp_path: Path) -> None:
    ended, said = run(plan(tmp_path, FINISH, syncer="import time; time.sleep(60)", open_s=0.0))
    assert ended.exit_code == 1
    assert f"did not write {tmp_path / 'join'}" in said.replace("\n", " ")


@pytest.mark.seconds
def test_a_join_file_of_an_earlier_syncer_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "join").write_text("diloco://127.0.0.1:1/run#stale," + "0" * 64)
    ended, _ = run(plan(tmp_path, FINISH, linger_s=10.0), [{"id": "l0", "phase": "left"}])
    assert ended.exit_code == 0


def test_a_summary_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"status": "finished"}))
    ended, _ = run(plan(tmp_path, FINISH, syncer="raise SystemExit(1)"))
    assert ended == Ended(exit_code=1, summary=None)


def test_a_syncer_that_gives_up_ends_the_run(tmp_path: Path) -> None:
    dies = SYNCER.partition("while")[0] + "\nwhile not (run_dir / 'pid-l1').exists(): time.sleep(0.01)\nsys.exit(5)"
    ended, said = run(plan(tmp_path, SLEEP, syncer=dies))
    assert ended.exit_code == 1
    assert "syncer died (exit code 5)" in said


def test_learners_that_failed_before_they_took_part_are_not_told_about_the_strategy(tmp_path: Path) -> None:
    ended, said = run(plan(tmp_path, LEARNER + "\nraise ValueError('no data')"), [])
    assert ended.exit_code == 1
    assert "ValueError: no data" in said
    assert "Trainer(" not in said


def test_a_script_without_the_strategy_gets_a_message(tmp_path: Path) -> None:
    ended, said = run(plan(tmp_path, LEARNER, linger_s=1e9), [])
    assert ended.exit_code == 1
    assert 'Trainer(strategy="decoupled_diloco")' in said


@pytest.mark.parametrize(("threads", "wanted"), [(None, "1"), (5, "5")])
def test_cores_are_divided_unless_threads_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None, wanted: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    this = plan(tmp_path, FINISH, num_learners=10_000, threads=threads)
    assert this.learner("l0", JoinAddress.parse(JOIN)).env["OMP_NUM_THREADS"] == wanted


def test_a_learner_writes_into_its_own_folder(tmp_path: Path) -> None:
    command = plan(tmp_path, FINISH).learner("l1", JoinAddress.parse(JOIN))
    assert command.env["PL_TRAINER_DEFAULT_ROOT_DIR"] == str(command.log_path.parent) == str(tmp_path / "learners/l1")


def test_threads_of_the_environment_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in plan(tmp_path, FINISH).learner("l0", JoinAddress.parse(JOIN)).env


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("prefix", "number", "exit_code", "grace_s"),
    [
        ("", signal.SIGINT, 130, CTRL_C_GRACE_S),
        ("", signal.SIGTERM, 143, GRACE_S),
        (STUBBORN, signal.SIGINT, 130, 600.0),
    ],
)
def test_an_interrupted_run_ends_its_learners_first_and_at_once_after_a_second_signal(
    tmp_path: Path, prefix: str, number: signal.Signals, exit_code: int, grace_s: float
) -> None:
    syncer = SYNCER.replace("signal.signal(signal.SIGTERM, end)", STUBBORN) if prefix else SYNCER
    here = Path(__file__)
    code = (
        f"import sys; sys.path[:0] = {[str(here.parent), *sys.path]!r}; import {here.stem} as test\n"
        f"test.drive({str(tmp_path)!r}, {prefix + SLEEP!r}, {syncer!r}, {600.0 if prefix else None})"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        deadline_s = time.monotonic() + 20.0
        while len(pids := [path.read_text() for path in tmp_path.glob("pid-*")]) < 3 or not all(pids):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        process.send_signal(number)
        while _is_pending(process.pid, number):  # otherwise the second signal may come first
            time.sleep(0.01)
        while prefix and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        said, _ = process.communicate(timeout=60.0)
    assert process.returncode == exit_code
    assert f"{number.name}: ending the run; learners have {grace_s:g} s" in said
    assert ("l0, l1: second signal; killed" in said) == bool(prefix)
    assert (tmp_path / "summary.json").exists() != bool(prefix)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def _is_pending(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has not handled a signal yet."""
    pending = re.search(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return pending is not None and bool(int(pending[1], 16) >> (number - 1) & 1)


def drive(run_dir: str, learner: str, syncer: str, grace_s: float | None) -> None:
    """Run the interrupted process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent again, it may come after the end of the run
    ended, said = run(plan(Path(run_dir), learner, syncer, grace_s=grace_s), [{"id": "l0", "phase": "stepping"}])
    print(said)
    sys.exit(ended.exit_code)
