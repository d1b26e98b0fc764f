"""Work on fragments with all cores. Fragments are independent, and calls for one fragment stay in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

from lightning_diloco.process.machine import cores_here
from lightning_diloco.process.threads import compute_alone


class ByFragment:
    """Threads that each work on some of the fragments. As a context manager, it waits for all work at its end.

    Args:
        num_fragments: number of fragments.
        num_threads: number of threads; None: one per core.
    """

    def __init__(self, num_fragments: int, num_threads: int | None = None) -> None:
        num_threads = max(1, min(num_threads or cores_here(), num_fragments))
        self._threads = [ThreadPoolExecutor(1, "diloco-restore", compute_alone) for _ in range(num_threads)]
        self._waiting: deque[Future[Any]] = deque()

    def do(self, p: int, call: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Queue a call for fragment p. Waits if many calls are queued, and raises the errors of earlier calls."""
        thread = self._threads[p % len(self._threads)]
        self._waiting.append(thread.submit(partial(call, *args, **kwargs)))
        while len(self._waiting) > 2 * len(self._threads):
            self._waiting.popleft().result()

    def settle(self) -> None:
        """Wait for all queued calls; raises the first error."""
        while self._waiting:
            self._waiting.popleft().result()

    def __enter__(self) -> ByFragment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self.settle()
        finally:
            for thread in self._threads:
                thread.shutdown(cancel_futures=True)
