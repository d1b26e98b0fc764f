"""Prefetches ranges in a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from torch import Tensor

from lightning_diloco.protocol.data_ranges import Lease

_Result = tuple[Lease, Tensor, bool, bool]


class ReadAhead:
    """Reads ranges in the order of the requests.

    Args:
        read: reads one range.

    Attributes:
        num_requested: number of ranges that were requested and not yet returned by `get`.
    """

    def __init__(self, read: Callable[[Lease], tuple[Tensor, bool]]) -> None:
        self._read = read
        self._wanted: queue.SimpleQueue[tuple[Lease, bool] | None] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[_Result | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.num_requested = 0

    def request(self, lease: Lease, *, is_leased: bool = True) -> None:
        """Request a range."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="diloco-reader", daemon=True)
            self._thread.start()
        self.num_requested += 1
        self._wanted.put((lease, is_leased))

    @property
    def is_there(self) -> bool:
        """Whether the oldest requested range has been read."""
        return not self._found.empty()

    def get(self) -> _Result:
        """Return the oldest requested range; raise the exception if reading it failed."""
        self.num_requested -= 1
        found = self._found.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """End the thread after the present range; idempotent."""
        self._wanted.put(None)

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            lease, is_leased = wanted
            try:
                self._found.put((lease, *self._read(lease), is_leased))
            except BaseException as error:
                self._found.put(error)
