"""Cores of its own for PJRT's CPU device, as an accelerator has, and what each part of a learner computed.

1. PJRT's CPU device computes with threads of the process, as many as there are cores when its client is made. Whatever
   else runs takes these cores from it: tracing, the link, the syncer. On an accelerator they are the host's to spare.
2. So the device gets the first half of the cores, and all other threads, and processes they start, the second half. A
   thread keeps its cores, and those it starts inherit them. Linux only.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
import torch

from lightning_diloco.devices.xla import ops as xla


class Cores:
    """Who computes where; make it before anything is on an XLA device.

    Args:
        shared: leave everything where it is, on all cores.
    """

    def __init__(self, *, shared: bool) -> None:
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) if shared else len(cores) // 2
        if not half:
            raise RuntimeError("one core cannot be shared out between the device and its host; use --shared")
        device, host = set(cores[:half]), set(cores[half:] or cores)
        before = _threads(os.getpid())
        os.sched_setaffinity(0, device)
        xla.upload(torch.zeros(1))  # makes the client, and its threads
        xla.sync()
        self._device_threads = _threads(os.getpid()) - before
        for thread in before:
            os.sched_setaffinity(thread, host)

    def computed_s(self, syncer: int | None) -> dict[str, float]:
        """CPU seconds so far: of the training thread, which calls, the device, all else here, the syncer's process."""
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
    except FileNotFoundError:  # it ended
        return 0.0
