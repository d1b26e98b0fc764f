"""Loads the compiled loops of `kernels.py` and runs them in several threads.

1. numba is optional (`pip install 'lightning-diloco[syncer]'`). With or without it all results have the same bits. The
   loops are about ten times as fast as torch, which makes a pass over memory for each operation.
2. The syncer loads them, learners do not: numba and its compiler take 200 MB of memory. `warm_up` loads them in a
   thread. The first time on a machine this compiles the loops, which takes a few seconds; the result is cached on disk.
   Until it is done, torch is used.
3. A vector is cut into units, always the same ones. The threads, as many as torch uses, process one unit after the
   other.

Source: our choice.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

SMALLEST_NUMEL = 1 << 20
"""Shorter vectors are left to torch; a run with only shorter fragments does not load numba."""

UNIT_NUMEL = 1 << 18
INT8_LEVELS = np.float32(127)

Array = np.ndarray[Any, Any]
_T = TypeVar("_T")
_loaded: ModuleType | None = None
_thread: threading.Thread | None = None
_starting = threading.Lock()
_NUM_FREE = 5  # buffers for the state of a fragment, its update and its gradient
_free: list[Array] = []


def warm_up(numel: int) -> None:
    """Load the loops in a thread, once per process, if fragments of this length will use them."""
    global _thread
    with _starting:
        if numel >= SMALLEST_NUMEL and _thread is None:
            _thread = threading.Thread(target=_warm_up, name="compile-kernels")
            _thread.start()


def load() -> str | None:
    """Load the loops, and compile those that are not in numba's cache; return why this is impossible, or None."""
    global _loaded
    try:
        from lightning_diloco.core import kernels

        _compile(kernels)
    except Exception as error:  # numba does not support this machine, or cannot write its cache
        return f"{type(error).__name__}: {error}"
    _loaded = kernels
    return None


def kernels_for(x: Tensor, bits: int | None) -> Any | None:
    """Return `kernels.py` if it is loaded and supports this vector: int8, on the CPU, contiguous and long."""
    is_ours = bits == 8 and x.device.type == "cpu" and x.is_contiguous() and x.numel() >= SMALLEST_NUMEL
    return _loaded if is_ours else None


def in_parallel(call: Callable[..., _T], units: Iterable[tuple[int, ...]]) -> list[_T]:
    """Call a function with each unit, in several threads; returns the results in the order of the units."""
    num_threads = torch.get_num_threads()
    over = map if num_threads == 1 else _threads(num_threads).map
    return list(over(lambda unit: call(*unit), units))


def ranges(numel: int, block_size: int, unit: int = UNIT_NUMEL) -> Iterator[tuple[int, int]]:
    """Cut a vector into units of whole blocks; yields start and stop."""
    step = max(1, unit // block_size) * block_size
    return ((start, min(start + step, numel)) for start in range(0, numel, step))


def array(x: Tensor) -> Array:
    """Return a view of a tensor as an array; bfloat16 becomes uint16."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x.detach()).numpy()


def empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor on the host in memory that was used before, if there is some: new memory is slow to write.

    Memory comes from numpy, which asks for large pages. It is used again as soon as nothing refers to it: no tensor,
    array or memoryview, in any thread.
    """
    nbytes = numel * dtype.itemsize
    if nbytes < SMALLEST_NUMEL:
        return torch.empty(numel, dtype=dtype)
    memory = _taken(nbytes)
    lent = (ctypes.c_char * memory.nbytes).from_buffer(memory.data)
    weakref.finalize(lent, _give_back, memory).atexit = False
    return torch.frombuffer(lent, dtype=dtype, count=numel)


def _taken(nbytes: int) -> Array:
    for _ in range(len(_free)):
        try:
            memory = _free.pop(0)
        except IndexError:  # another thread took it
            break
        if nbytes <= memory.nbytes <= 1.25 * nbytes:
            return memory
        _free.append(memory)
    return np.empty(nbytes, np.uint8)


def _give_back(memory: Array) -> None:
    """Keep memory for the next one; runs in the thread that drops the last reference, so it takes no lock."""
    _free.append(memory)
    del _free[:-_NUM_FREE]


@cache
def _threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "kernels")


def _warm_up() -> None:
    if (problem := load()) is not None:
        log.warning(
            "numba cannot be used (%s): merging large fragments is up to ten times slower; "
            "pip install 'lightning-diloco[syncer]'",
            problem,
        )


def _compile(kernels: Any) -> None:
    """Call each function once, with the types that it is called with."""
    x, q, scales, f32 = np.zeros(16, np.float32), np.zeros(16, np.int8), np.zeros(1, np.uint16), np.float32
    kernels.quantize(x, q, scales, 16, INT8_LEVELS)
    kernels.dequantize(q, scales, x, 16)
    kernels.add_weighted(q, scales, 1.0, x, 16)
    payloads = np.array([[q.ctypes.data, scales.ctypes.data]])
    kernels.weighted_sum(payloads, np.ones(1), 0, np.zeros(16, np.uint16), 16)
    kernels.dots(payloads, 0, 16, 16)
    kernels.momentum_dots(np.zeros(16, np.uint16), x, 16, 1)
    kernels.outer_step(np.zeros(16, np.uint16), (x,) * 3, (x,) * 3, (q, scales), (f32(0),) * 3, 16, INT8_LEVELS)
