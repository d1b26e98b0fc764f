"""Whether a process still runs."""

from __future__ import annotations

import psutil


def is_running(pid: int) -> bool:
    """Whether it runs; a zombie that nobody has reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
