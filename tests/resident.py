"""Memory of a process as the kernel reports it, in bytes."""

from __future__ import annotations

from pathlib import Path


def resident_now(pid: int) -> int:
    """Return its resident set size."""
    return _read(pid, "VmRSS")


def resident_at_most(pid: int) -> int:
    """Return its peak resident set size, since its start or since `forget_peak`."""
    return _read(pid, "VmHWM")


def forget_peak(pid: int | None = None) -> None:
    """Reset the peak of a process of this user, by default of this process."""
    Path(f"/proc/{pid or 'self'}/clear_refs").write_text("5")


def _read(pid: int, what: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith(what))
    return kib * 1024
