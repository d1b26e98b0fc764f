"""A process that ends with an exception has exit code 1, although its threads wait for a rank that ends meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PEER = """
import sys
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=2)
print("here", flush=True)
sys.stdin.read()
"""

DYING = """
import atexit, os, signal, sys, threading, time
import torch
import torch.distributed as dist
from lightning_diloco.process.exit import arm_hard_exit, disarm_hard_exit, fail_at_exit, hard_exit, take_back_failure

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=1, world_size=2)
thread = threading.Thread(target=dist.broadcast, args=(torch.zeros(1), 0), daemon=True)


class PeerEndsWithTheInterpreter:
    def __del__(self, kill=os.kill, sleep=time.sleep, clock=time.monotonic):
        kill(int(sys_argv[2]), 9)
        until_s = clock() + 5.0
        while clock() < until_s:
            sleep(0.01)  # lets the thread come back


sys_argv = sys.argv
sys.modules["last"] = PeerEndsWithTheInterpreter()
atexit.register(print, "what was registered has run")
thread.start()
{protect}
{end}
"""
HANDLED = "try: raise ValueError('boom')\nexcept ValueError: sys.exit(7)"


def code_and_output(tmp_path: Path, protect: str, end: str) -> tuple[int, str]:
    store = tmp_path / "store"
    with subprocess.Popen(
        [sys.executable, "-c", PEER, store], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        script = DYING.replace("{protect}", protect).replace("{end}", end)
        arguments = [sys.executable, "-c", script, store, str(peer.pid)]
        found = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
        peer.kill()
    return found.returncode, found.stdout + found.stderr


def test_a_script_with_an_exception_ends_with_code_1(tmp_path: Path) -> None:
    code, output = code_and_output(tmp_path, "arm_hard_exit()", "raise ValueError('boom')")
    assert code == 1, output
    assert "ValueError: boom" in output
    assert output.count("what was registered has run") == 1


def test_a_process_whose_exception_is_handled_elsewhere_ends_with_its_code(tmp_path: Path) -> None:
    code, output = code_and_output(tmp_path, "hard_exit(3)", "sys.exit(3)")
    assert code == 3, output
    assert output.count("what was registered has run") == 1


@pytest.mark.parametrize("end", ["", "sys.exit(0)"])
def test_a_process_whose_work_was_lost_ends_with_code_1_and_logs_the_reason(tmp_path: Path, end: str) -> None:
    code, output = code_and_output(tmp_path, "fail_at_exit('work was lost')", end)
    assert code == 1, output
    assert "exit code 1: work was lost" in output
    assert output.count("what was registered has run") == 1


def test_a_failure_can_be_taken_back(tmp_path: Path) -> None:
    end = "assert (take_back_failure(), take_back_failure()) == ('lost', None); del sys.modules['last']; sys.exit(7)"
    code, output = code_and_output(tmp_path, "fail_at_exit('lost')", end)
    assert code == 7, output
    assert "exit code 1" not in output


@pytest.mark.parametrize("end", ["raise ValueError('boom')", "sys.exit(3)"])
@pytest.mark.parametrize("protect", ["", "hard_exit(3); disarm_hard_exit()"])
def test_a_process_without_the_hard_exit_aborts(tmp_path: Path, protect: str, end: str) -> None:
    code, output = code_and_output(tmp_path, protect, end)
    assert code == -6, output


def test_a_script_that_handles_the_exception_keeps_its_exit_code(tmp_path: Path) -> None:
    """No thread waits here, so nothing aborts."""
    code, output = code_and_output(tmp_path, "arm_hard_exit(); del sys.modules['last']", HANDLED)
    assert code == 7, output


COMPUTING = """
import atexit, sys, threading, time
import torch
from lightning_diloco.process.exit import let_threads_become_idle

{protect}
begins = threading.Event()


class InterpreterThatTakesLongToEnd:
    def __del__(self, sleep=time.sleep, clock=time.monotonic):
        until_s = clock() + 10.0
        while clock() < until_s:
            sleep(0.01)  # lets the thread come back


sys.modules["last"] = InterpreterThatTakesLongToEnd()


def compute():
    x = torch.rand(3000, 3000)
    begins.set()
    x @ x @ x  # seconds, without the interpreter's lock


threading.Thread(target=threading.Event().wait, daemon=True).start()  # idle for ever, and so not waited for
torch.set_num_threads(1)
threading.Thread(target=compute, daemon=True).start()
begins.wait()
"""


@pytest.mark.parametrize(
    ("protect", "code"), [("atexit.register(let_threads_become_idle, 60.0)", 0), ("", -signal.SIGABRT)]
)
def test_threads_that_compute_become_idle_before_the_interpreter_ends(protect: str, code: int) -> None:
    script = COMPUTING.replace("{protect}", protect)
    arguments = [sys.executable, "-c", script]
    found = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == code, found.stderr
