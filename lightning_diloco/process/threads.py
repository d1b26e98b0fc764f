"""Background threads: they end together, report errors, and leave the cores to training; some can be abandoned."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Job = Callable[[], None]
T = TypeVar("T")

NICENESS = 10  # background threads
LOOK_S = 0.1

_counting = threading.Lock()


class Crew:
    """A group of daemon threads that end together.

    Args:
        failed: called with an exception, in the thread that raised it.

    Attributes:
        stopping: set when all threads must end.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self.stopping = threading.Event()
        self._failed = failed
        self._threads: list[threading.Thread] = []

    def start(self, name: str, run: Job) -> None:
        """Run a function in a new thread."""
        thread = threading.Thread(target=self._guarded, args=(run,), name=f"diloco-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, within_s: float) -> list[str]:
        """Wait for all threads; returns the names of those still running."""
        until_s = time.monotonic() + within_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _guarded(self, run: Job) -> None:
        try:
            run()
        except BaseException as error:
            self._failed(error)


class Jobs:
    """A thread of a crew that runs jobs in order.

    Args:
        crew: the crew.
        name: name of the thread.
        yields: run at low priority; False if training may wait for the jobs.
    """

    def __init__(self, crew: Crew, name: str, *, yields: bool = True) -> None:
        self._crew = crew
        self._yields = yields
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        crew.start(name, self._run)

    def put(self, job: Job) -> None:
        """Queue a job; does not wait."""
        self._queue.put(job)

    def do(self, job: Job) -> None:
        """Run a job and wait for it, or for the end of the crew. Do not call this from a job of this thread."""
        done = threading.Event()

        def run() -> None:
            try:
                job()
            finally:
                done.set()

        self._queue.put(run)
        while not done.wait(0.1) and not self._crew.stopping.is_set():
            pass

    def stop(self) -> None:
        """Wake the thread, so that it ends."""
        self._queue.put(None)

    def _run(self) -> None:
        compute_alone()
        if self._yields:
            yield_cores()
        while (job := self._queue.get()) is not None and not self._crew.stopping.is_set():
            job()
            del job  # frees its tensors before the next job comes


def compute_alone() -> None:
    """Run tensor operations of the calling thread in this thread only.

    Many small operations with several threads each are very slow on a busy machine, and training needs the cores. Later
    threads keep the default: `torch.set_num_threads` changes it too, so it is restored here.
    """
    with _counting:
        before = torch.get_num_threads()  # also initializes this thread now, which would otherwise overwrite the 1
        torch.set_num_threads(1)
        restoring = threading.Thread(target=torch.set_num_threads, args=(before,), name="diloco-restoring")
        restoring.start()
        restoring.join()


def unless(is_futile: Callable[[], bool], run: Callable[[], T]) -> T | None:
    """Run a function in a new thread, and wait for the result while it is useful.

    A network call cannot be interrupted, so an abandoned thread runs until its call ends.

    Args:
        is_futile: called often; returns whether the result is no longer useful.
        run: the function.

    Returns:
        The result; None if it is no longer useful.

    Raises:
        BaseException: what `run` raised.
    """
    found: list[T] = []
    failed: list[BaseException] = []
    ended = threading.Event()

    def make() -> None:
        try:
            found.append(run())
        except BaseException as error:  # raised again in the caller's thread
            failed.append(error)
        finally:
            ended.set()

    threading.Thread(target=make, name="diloco-call", daemon=True).start()
    while not ended.wait(LOOK_S):
        if is_futile():
            return None
    if failed:
        raise failed[0]
    return found[0]


def yielding(run: Callable[[], T]) -> T:
    """Run a function in a thread of low priority, which its own threads inherit, and wait for the result."""
    with ThreadPoolExecutor(1, initializer=yield_cores) as pool:
        return pool.submit(run).result()


def yield_cores(who: int | None = None) -> None:
    """Lower the priority of a thread, or of a process without other threads, so that training gets the cores.

    Threads and processes that it starts later inherit the priority. Only Linux has priorities per thread; elsewhere
    the calling thread is not changed.

    Args:
        who: id in the kernel; None: the calling thread.
    """
    if who is None:
        if sys.platform != "linux":
            return
        who = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, who, max(NICENESS, os.getpriority(os.PRIO_PROCESS, who)))
