"""What the kernel says a process holds of memory, in bytes."""

from __future__ import annotations

from pathlib import Path


def resident_now(pid: int) -> int:
    """Its resident set."""
    return _read(pid, "VmRSS")


def resident_at_most(pid: int) -> int:
    """The largest that ever was, or since `forget_peak`."""
    return _read(pid, "VmHWM")


def forget_peak(pid: int | None = None) -> None:
    """From here on `resident_at_most` of a process of this user, by default of this one, counts anew."""
    Path(f"/proc/{pid or 'self'}/clear_refs").write_text("5")


def _read(pid: int, what: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith(what))
    return kib * 1024
