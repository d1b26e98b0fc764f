"""Dedicated cores for PJRT's CPU device, and CPU times of the parts of a learner.

1. PJRT's CPU device computes with threads of the process, one per core that is available when its client is created.
   Tracing, the link and the syncer compete for these cores. On a machine with an accelerator, they would not.
2. Therefore the device gets the first half of the cores. All other threads and their child processes get the second
   half. A thread keeps its cores, and threads that it starts inherit them. Linux only.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
import torch

from lightning_diloco.devices.xla import ops as xla


class Cores:
    """Assigns cores. Create it before anything is on an XLA device.

    Args:
        shared: whether everything may use all cores.
    """

    def __init__(self, *, shared: bool) -> None:
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) if shared else len(cores) // 2
        if not half:
            raise RuntimeError("one core cannot be shared out between the device and its host; use --shared")
        device, host = set(cores[:half]), set(cores[half:] or cores)
        before = _threads(os.getpid())
        os.sched_setaffinity(0, device)
        xla.upload(torch.zeros(1))  # creates the client and its threads
        xla.sync()
        self._device_threads = _threads(os.getpid()) - before
        for thread in before:
            os.sched_setaffinity(thread, host)

    def computed_s(self, syncer: int | None) -> dict[str, float]:
        """Return CPU seconds so far of the training thread (the caller), the device, other threads, and the syncer."""
        own = {thread: _computed_s(os.getpid(), thread) for thread in _threads(os.getpid())}
        training = own.pop(threading.get_native_id())
        device = sum(own.pop(thread, 0.0) for thread in self._device_threads)
        others = 0.0 if syncer is None else sum(psutil.Process(syncer).cpu_times()[:2])
        return {"training": training, "device": device, "link": sum(own.values()), "syncer": others}


def _threads(process: int) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{process}/task").iterdir()}


def _computed_s(process: int, thread: int) -> float:
    try:
        return int(Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:  # the process has ended
        return 0.0
