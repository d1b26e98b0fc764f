"""Threads beside training: they end together, the first error of any is told, and none takes cores from training."""

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

NICENESS = 10  # of what nobody waits for

_counting = threading.Lock()


class Crew:
    """Daemon threads with one end.

    Args:
        failed: called, in the thread that failed, with what it raised.

    Attributes:
        stopping: set when all of them are to end.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self.stopping = threading.Event()
        self._failed = failed
        self._threads: list[threading.Thread] = []

    def start(self, name: str, run: Job) -> None:
        """Run this in a thread until it returns."""
        thread = threading.Thread(target=self._guarded, args=(run,), name=f"diloco-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, within_s: float) -> list[str]:
        """Wait for all of them; returns the names of those still running."""
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
    """Work that one thread of a crew does, one piece after another.

    Args:
        crew: which.
        name: of the thread.
        yields: cores that are short to training; not where training may wait for this work.
    """

    def __init__(self, crew: Crew, name: str, *, yields: bool = True) -> None:
        self._crew = crew
        self._yields = yields
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        crew.start(name, self._run)

    def put(self, job: Job) -> None:
        """Have this done; does not wait."""
        self._queue.put(job)

    def do(self, job: Job) -> None:
        """Have this done and wait for it, or for the end of the crew; not from a job of this thread."""
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
        """Wake the thread, so that it sees that the crew ends."""
        self._queue.put(None)

    def _run(self) -> None:
        compute_alone()
        if self._yields:
            yield_cores()
        while (job := self._queue.get()) is not None and not self._crew.stopping.is_set():
            job()
            del job  # or what it worked on would be held until the next one


def compute_alone() -> None:
    """Tensor operations of the calling thread use this thread only.

    Many small operations with threads of their own collapse on a busy machine, and training needs the cores. Only the
    caller is changed: `torch.set_num_threads` also sets what threads that begin later get, which is put back.
    """
    with _counting:
        before = torch.get_num_threads()  # also has this thread take the default now, not in place of the 1 below
        torch.set_num_threads(1)
        restoring = threading.Thread(target=torch.set_num_threads, args=(before,), name="diloco-restoring")
        restoring.start()
        restoring.join()


def yielding(run: Callable[[], T]) -> T:
    """Run this in a thread that yields its cores, and wait for it; so do the threads that it starts."""
    with ThreadPoolExecutor(1, initializer=yield_cores) as pool:
        return pool.submit(run).result()


def yield_cores(who: int | None = None) -> None:
    """A thread, or a process that has started no other yet, gets what training leaves of the cores.

    What it starts from then on, threads for its tensor operations too, is like it. Threads have a priority of their own
    on Linux; elsewhere the calling one stays as it is.

    Args:
        who: its id, as the kernel counts; None: the calling thread.
    """
    if who is None:
        if sys.platform != "linux":
            return
        who = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, who, max(NICENESS, os.getpriority(os.PRIO_PROCESS, who)))
