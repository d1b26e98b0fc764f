"""A process can limit its heaps, and can return free memory to the system."""

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


TRIM = """
import ctypes, runpy, sys
module, libc = runpy.run_path(sys.argv[1]), ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
blocks = []
for _ in range(1000):
    blocks.append(libc.malloc(ctypes.c_size_t(30_000)))
    ctypes.memset(ctypes.c_void_p(blocks[-1]), 1, 30_000)
fence = libc.malloc(ctypes.c_size_t(30_000))
for block in blocks:
    libc.free(block)
before = resident()
returned = module["return_free_memory"]() if sys.argv[2] == "return" else False
print(int(returned), before - resident())
"""


def returned(asked: str) -> tuple[bool, int]:
    command = [sys.executable, "-I", "-c", TRIM, malloc.__file__, asked]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    was_returned, num_bytes = ended.stdout.split()
    return was_returned == "1", int(num_bytes)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_free_memory_in_the_middle_of_a_heap_stays_until_it_is_returned() -> None:
    was_returned, num_bytes = returned("return")
    if not was_returned:
        pytest.skip("this allocator is not glibc's")
    assert num_bytes > 25e6
    assert abs(returned("keep")[1]) < 1e6
