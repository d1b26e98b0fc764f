"""This machine or container: its memory and cores, and what this user's processes on it share."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import tempfile
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_here() -> int:
    """Return the memory of this machine or container, in bytes."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return min(physical, int(limit)) if limit.isdigit() else physical


def cores_here() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def interface_of(ip: str) -> str | None:
    """Return the name of the network interface with this IPv4 address; None if it is not found (Linux only)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address, or this is not Linux
                continue
            if socket.inet_ntoa(answer[20:24]) == ip:
                return name
    return None


def private_folder() -> Path:
    """Return the folder that the processes of this user on this machine share."""
    folder = Path(tempfile.gettempdir()) / f"lightning_diloco-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def lock_here(name: str) -> bool:
    """Lock a name for this process until it ends; child processes do not inherit the lock.

    Returns:
        Whether no other process of this user on this machine holds it.
    """
    fd = os.open(private_folder() / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(fd)
        return False
    return True
