"""Check whether a process still runs."""

from __future__ import annotations

import psutil


def is_running(pid: int) -> bool:
    """Return whether the process runs; a zombie counts as ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
