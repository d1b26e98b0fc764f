"""A stand-in for the package torch_tpu on a TPU VM: its names, its signatures and its rules, on the device of `late.py`.

1. A process has one chip, `tpu:0`. It belongs to the process that uses it first; a process without a rank takes all.
2. Ranks need variables that `set_tpu_launch_env` sets before they start. Without them, the process aborts.
3. Functions of `torch.tpu` with a counterpart in `torch.accelerator` raise if the caller is not torch.
4. Collectives of `tpu_dist` run on gloo.

FAKE_CHIPS is a folder with an empty file for each chip. `test_fake_tpu.py` compares the signatures with the wheel.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.devices import late

_claimed: list[Any] = []  # open files


def _internal(instead: str) -> Callable[[Any], Any]:
    def of(function: Any) -> Any:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != "torch":
                raise RuntimeError(f"torch.tpu.{function.__name__}() is internal. Use {instead} instead.")
            return function(*args, **kwargs)

        return checked

    return of


def chips() -> list[Path]:
    """The files of this machine's chips."""
    return sorted(Path(os.environ["FAKE_CHIPS"]).iterdir())


def _claim() -> None:
    if _claimed:
        return
    own = chips()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        needed = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY", "RANK", "LOCAL_RANK")
        if missing := [name for name in needed if name not in os.environ]:
            print(f"F0000 missing required environment variables: {missing}", file=sys.stderr, flush=True)
            os.abort()
        own = [own[int(os.environ["LOCAL_RANK"])]]
    for chip in own:
        file = chip.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"chip {chip.name} is used by another process") from None
        _claimed.append(file)


@_internal("torch.accelerator.device_count")
def device_count() -> int:
    """Number of chips of this host; uses none."""
    return len(chips())


@_internal("torch.accelerator.is_available")
def is_available() -> bool:
    """Whether there are chips; uses none."""
    return bool(chips())


@_internal("torch.accelerator.current_device_index")
def current_device() -> int:
    """Index of this process's chip."""
    _claim()
    return 0


@_internal("torch.accelerator.set_device_index")
def set_device(device: Any) -> None:
    """Accept this process's chip only."""
    _claim()
    if torch.device("tpu", device if isinstance(device, int) else torch.device(device).index or 0).index != 0:
        raise ValueError(f"Cannot set TPU device to {device}, current process is bound to device index 0.")


@_internal("torch.accelerator.synchronize")
def synchronize(device: int | None = None) -> None:
    """Wait for all work."""
    late.synchronize()


@_internal("torch.accelerator.current_stream")
def current_stream(device: torch.device | None = None) -> late.Stream:
    """The only stream."""
    return late.current()


def set_tpu_launch_env(*, nnodes: int | None = None, nproc_per_node: int | None = None) -> None:
    """Set what ranks need, except what is set."""
    number = nproc_per_node or len(chips())
    topology = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}[number]  # as on v6e: a KeyError for other numbers
    sockets = [socket.create_server(("localhost", 0)) for _ in range(number)]
    addresses = ",".join(f"localhost:{it.getsockname()[1]}" for it in sockets)
    for it in sockets:
        it.close()
    os.environ.setdefault("TORCH_TPU_SLICEBUILDER_ADDRESSES", addresses)
    os.environ.setdefault("TORCH_TPU_TOPOLOGY", topology)


class OverGloo(dist.ProcessGroup):
    """Collectives on the tensors' data, when all work that was queued before has run."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        """The name."""
        return "tpu_dist"

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce in place."""
        return self._run("allreduce", tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Overwrite with the root's."""
        return self._run("broadcast", tensors, opts)

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """Collect the tensors of all ranks."""
        return self._run("allgather", outputs, tensors, opts or dist.AllgatherOptions())

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return self._run("barrier", opts or dist.BarrierOptions())

    def _run(self, name: str, *args: Any) -> Any:
        late.synchronize()
        getattr(self._gloo, name)(*torch.utils._pytree.tree_map(late.raw, args)).wait()
        done: Any = torch.futures.Future()
        done.set_result(args[0] if name != "barrier" else None)
        return torch._C._distributed_c10d._create_work_from_future(done)


def load() -> None:
    """Register the device, as the import of torch does where torch_tpu is installed."""
    functions = {
        it.__name__: it
        for it in (device_count, is_available, current_device, set_device, synchronize, current_stream)
    }
    make = late.late
    late.late = lambda data: (_claim(), make(data))[1]
    late.register("tpu", **functions)
    torch.accelerator.set_device_index = lambda device: _in_torch(set_device)(device)
    torch.accelerator.current_device_index = lambda: _in_torch(current_device)()
    torch.tpu.distributed = sys.modules["torch.tpu.distributed"] = distributed = ModuleType("torch.tpu.distributed")
    sys.modules["torch.tpu"] = torch.tpu
    distributed.set_tpu_launch_env = set_tpu_launch_env
    dist.Backend.register_backend("tpu_dist", OverGloo, devices=["tpu"])


def _in_torch(function: Any) -> Any:
    return function.__wrapped__
