"""Background threads do not affect training, and end together."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest

from lightning_diloco.process.threads import NICENESS, Crew, Jobs, yielding


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.seconds
def test_computing_alone_leaves_all_other_threads_as_they_were() -> None:
    code = """
import threading, torch
from lightning_diloco.process.threads import compute_alone
torch.set_num_threads(3)

def elsewhere(*calls):
    got = []
    thread = threading.Thread(target=lambda: got.extend(call() for call in calls))
    thread.start()
    thread.join()
    return got

matmul = lambda: (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item()
print(elsewhere(compute_alone, torch.get_num_threads, matmul, torch.get_num_threads)[1::2])
print(torch.get_num_threads(), elsewhere(torch.get_num_threads))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[1, 1]\n3 [3]\n"


def test_crew_reports_the_first_error_and_ends_on_request() -> None:
    errors: list[BaseException] = []
    crew = Crew(errors.append)
    jobs, done = Jobs(crew, "jobs"), []
    jobs.do(lambda: done.append(threading.current_thread().name))
    assert done == ["diloco-jobs"]
    jobs.put(lambda: 1 / 0)
    crew.stopping.set()
    jobs.stop()
    assert crew.join(5.0) == []
    assert errors == [] or isinstance(errors[0], ZeroDivisionError)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_jobs_yield_cores_unless_training_waits_for_them() -> None:
    crew, found, before = Crew(pytest.fail), [], niceness()
    all_jobs = [Jobs(crew, "yielding"), Jobs(crew, "awaited", yields=False)]
    for jobs in all_jobs:
        jobs.do(lambda: found.append(niceness()))
    crew.stopping.set()
    for jobs in all_jobs:
        jobs.stop()
    assert crew.join(5.0) == []
    assert found == [max(before, NICENESS), before]
    assert niceness() == before


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_low_priority_is_inherited_by_new_threads_only() -> None:
    def starts_a_thread() -> list[int]:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(niceness()))
        thread.start()
        thread.join()
        return found

    before = niceness()
    assert yielding(starts_a_thread) == [max(before, NICENESS)]
    assert niceness() == before
    with pytest.raises(ZeroDivisionError):
        yielding(lambda: 1 / 0)


def test_finished_job_holds_no_objects() -> None:
    class Held:
        pass

    crew = Crew(pytest.fail)
    jobs, held = Jobs(crew, "jobs"), Held()
    gone, done = weakref.ref(held, lambda _: done.set()), threading.Event()
    jobs.put(partial(lambda _: None, held))
    del held
    assert done.wait(5.0)
    assert gone() is None
    crew.stopping.set()
    jobs.stop()
    assert crew.join(5.0) == []


def test_failing_job_is_reported() -> None:
    told = threading.Event()
    errors: list[BaseException] = []
    crew = Crew(lambda error: (errors.append(error), told.set()))
    Jobs(crew, "jobs").put(lambda: 1 / 0)
    assert told.wait(5.0)
    assert isinstance(errors[0], ZeroDivisionError)
    assert crew.join(5.0) == []


def test_thread_that_does_not_end_is_named() -> None:
    crew, release = Crew(lambda error: None), threading.Event()
    crew.start("stuck", lambda: release.wait() and None)
    assert crew.join(0.01) == ["diloco-stuck"]
    release.set()
    assert crew.join(5.0) == []
