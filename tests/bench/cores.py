"""Cores of its own for PJRT's CPU device, as an accelerator has, and what each part of a learner computed.

1. PJRT's CPU device computes with threads of the process, as many as there are cores when its client is made. Whatever
   else runs takes these cores from it: tracing, the link, the syncer. On an accelerator they are the host's to spare.
2. So the device gets the first half of the cores, and all other threads, and processes they start, the second half. A
   thread keeps its cores, and those it starts inherit them. Linux only.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch

from lightning_diloco.devices import xla


class Cores:
    """Who computes where; make it before anything is on an XLA device.

    Args:
        shared: leave everything where it is, on all cores.

    Attributes:
        text: one line that says it.
    """

    def __init__(self, *, shared: bool) -> None:
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) if shared else len(cores) // 2
        if not half:
            raise RuntimeError("one core cannot be shared out between the device and its host; use --shared")
        device, host = set(cores[:half]), set(cores[half:] or cores)
        self._has_one_core = half == 1 and not shared
        before = _threads(os.getpid())
        os.sched_setaffinity(0, device)
        xla.upload(torch.zeros(1))  # makes the client, and its threads
        xla.sync()
        self._device_threads = _threads(os.getpid()) - before
        for thread in before:
            os.sched_setaffinity(thread, host)
        self.text = f"{len(device)} core(s) for the device, {len(host)} for its host{', the same' * shared}"

    def computed_s(self, syncer: int | None) -> dict[str, float]:
        """CPU seconds so far: of the training thread, which calls, the device, all else here, the syncer's process."""
        own = {thread: _times_s(os.getpid(), thread)[0] for thread in _threads(os.getpid())}
        training = own.pop(threading.get_native_id())
        device = sum(own.pop(thread, 0.0) for thread in self._device_threads)
        others = 0.0 if syncer is None else sum(_times_s(syncer, thread)[0] for thread in _threads(syncer))
        return {"training": training, "device": device, "link": sum(own.values()), "syncer": others}

    def now_s(self) -> float:
        """A clock that stands still while the device's only core is taken by other programs; else any clock.

        The thread that computes waits for its core then. What other threads of the device compute meanwhile counts.
        """
        now_s = time.perf_counter()
        if not self._has_one_core:
            return now_s
        (_, queued_s), *others = sorted(
            (_times_s(os.getpid(), thread) for thread in self._device_threads), reverse=True
        )
        return now_s - max(0.0, queued_s - sum(computed_s for computed_s, _ in others))


def _threads(process: int) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{process}/task").iterdir()}


def _times_s(process: int, thread: int) -> tuple[float, float]:
    """Computing, and waiting for a core."""
    try:
        computed, queued, _ = Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()
    except FileNotFoundError:  # it ended
        return 0.0, 0.0
    return int(computed) / 1e9, int(queued) / 1e9
