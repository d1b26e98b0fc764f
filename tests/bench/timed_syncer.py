"""A syncer whose loop thread is timed.

python -m tests.bench.timed_syncer '{"out": FILE, "slow_s": 0}' syncer OPTIONS

It writes, at its end, when each event was finished and how long the loop thread was busy with it. With `slow_s`, one of
EVERY events takes this much longer, which is the control. As root, it has priority over the learners of its machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from lightning_diloco.cli.main import main as diloco
from lightning_diloco.syncer.service import SyncerService

HANDLERS = ("_handle", "_tick", "_install")
EVERY = 100
PRIORITY = -10


def time_loop(found: list[tuple[float, float]], slow_s: float) -> None:
    """Time the handlers of the loop thread; the time of a nested call belongs to its caller."""
    is_inside = False

    def timed(handler: Any) -> Any:
        def handle(self: SyncerService, *args: Any) -> None:
            nonlocal is_inside
            if is_inside:
                handler(self, *args)
                return
            is_inside, began_s = True, time.monotonic()
            try:
                if slow_s and len(found) % EVERY == 0:
                    time.sleep(slow_s)
                handler(self, *args)
            finally:
                ended_s, is_inside = time.monotonic(), False
                found.append((ended_s, ended_s - began_s))

        return handle

    for name in HANDLERS:
        setattr(SyncerService, name, timed(getattr(SyncerService, name)))


def main() -> int:
    """Run a syncer to the end of its run."""
    given, found = json.loads(sys.argv[1]), list[tuple[float, float]]()
    time_loop(found, given["slow_s"])
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)  # threads that start later inherit it
    try:
        return diloco(sys.argv[2:])
    finally:
        Path(given["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    raise SystemExit(main())
