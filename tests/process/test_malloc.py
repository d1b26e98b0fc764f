"""Threads share heaps in a process that asked for it, and have their own in one that did not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_diloco.process import malloc

SCRIPT = """
import ctypes, runpy, sys, threading
called = runpy.run_path(sys.argv[1])["keep_few_heaps"]() if sys.argv[2] == "few" else True
if not called:
    sys.exit(7)
libc, allocated = ctypes.CDLL(None), threading.Barrier(9)
libc.malloc.restype = ctypes.c_void_p
def allocate():
    libc.malloc(ctypes.c_size_t(50_000))
    allocated.wait()
    allocated.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
allocated.wait()
libc.malloc_stats()
allocated.wait()
"""


def num_heaps(asked: str) -> int:
    command = [sys.executable, "-I", "-c", SCRIPT, malloc.__file__, asked]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=Path(__file__).parent)
    if ended.returncode == 7 or "Arena" not in ended.stderr:
        pytest.skip("this allocator is not glibc's")
    assert ended.returncode == 0, ended.stderr
    return ended.stderr.count("Arena ")


def test_threads_share_a_few_heaps() -> None:
    assert num_heaps("few") <= malloc.NUM_HEAPS < num_heaps("as they are")
