"""A stand-in for torch_tpu on a TPU VM: its names, signatures and rules, on the device of `late.py`.

1. A process has one chip, `tpu:0`. It belongs to the process that uses it first; a process without a rank takes all.
2. Ranks need variables that `set_tpu_launch_env` sets before they start. Without them, the process aborts.
3. Functions of `torch.tpu` with a counterpart in `torch.accelerator` raise if the caller is not torch.
4. Collectives of `tpu_dist` run on gloo.

FAKE_CHIPS is a folder with an empty file for each chip. `test_torch_tpu.py` compares the signatures with the wheel.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.devices import late

_claimed: list[Any] = []  # open files
INSTEAD = {
    name: f"torch.accelerator.{instead}"
    for name, instead in {
        "current_device": "current_device_index",
        "current_stream": "current_stream",
        "device_count": "device_count",
        "get_rng_state": "random.get_rng_state",
        "initial_seed": "random.initial_seed",
        "is_available": "is_available",
        "set_device": "set_device_index",
        "set_stream": "set_stream",
        "synchronize": "synchronize",
    }.items()
}
"""Function of torch.accelerator to call instead, by the function of torch.tpu."""


def _internal(function: Any) -> Any:
    name = function.__name__

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != "torch":
            raise RuntimeError(f"torch.tpu.{name}() is internal. Use {INSTEAD[name]} instead.")
        return function(*args, **kwargs)

    return checked


def make_chips(folder: Path, number: int) -> Path:
    """Create a machine's chips in a new folder; return the folder, for FAKE_CHIPS."""
    folder.mkdir()
    for index in range(number):
        (folder / str(index)).touch()
    return folder


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


@_internal
def device_count() -> int:
    """Return the number of chips of this host; uses none."""
    return len(chips())


@_internal
def is_available() -> bool:
    """Return whether there are chips; uses none."""
    return bool(chips())


@_internal
def current_device() -> int:
    """Return the index of this process's chip."""
    _claim()
    return 0


@_internal
def set_device(device: Any) -> None:
    """Accept this process's chip only."""
    _claim()
    if torch.device("tpu", device if isinstance(device, int) else torch.device(device).index or 0).index != 0:
        raise ValueError(f"Cannot set TPU device to {device}, current process is bound to device index 0.")


@_internal
def synchronize(device: int | None = None) -> None:
    """Wait for all work."""
    late.synchronize()


@_internal
def current_stream(device: torch.device | None = None) -> Stream:
    """A stream."""
    return Stream(device)


@_internal
def set_stream(stream: Stream) -> None:
    """All streams are the same."""


@_internal
def initial_seed() -> int:
    """The seed of the only generator."""
    return torch.initial_seed()


@_internal
def get_rng_state(device: Any = "tpu") -> torch.Tensor:
    """The state of the only generator."""
    return torch.get_rng_state()


class Event:
    """A position in the only queue."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
        device: Any = None,
    ) -> None:
        pass

    def record(self, stream: Any = None) -> Event:
        """Do nothing, because work is in order."""
        return self

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Wait, on the host."""
        late.synchronize()


class Stream:
    """An alias of the only queue."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = device

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event."""
        return event or Event()

    def query(self) -> bool:
        """Refuse to answer."""
        raise NotImplementedError("Streams and Events are not fully implemented in TorchTPU.")

    def synchronize(self) -> None:
        """Wait, on the host."""
        late.synchronize()


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """All streams are the same."""
    yield


def set_tpu_launch_env(*, nnodes: int | None = None, nproc_per_node: int | None = None) -> None:
    """Set the variables that ranks need, except those that are set."""
    number = nproc_per_node or len(chips())
    of_v5p = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"}
    if number not in of_v5p:
        raise RuntimeError(f"No TPU topology found for count: {number}")
    sockets = [socket.create_server(("localhost", 0)) for _ in range(number)]
    addresses = ",".join(f"localhost:{it.getsockname()[1]}" for it in sockets)
    for it in sockets:
        it.close()
    os.environ.setdefault("TORCH_TPU_SLICEBUILDER_ADDRESSES", addresses)
    os.environ.setdefault("TORCH_TPU_TOPOLOGY", of_v5p[number])


class OverGloo(dist.ProcessGroup):
    """Collectives on the tensors' data; they first run all queued work."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        """The name."""
        return "tpu_dist"

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """The group's name."""
        return self._name

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce in place."""
        return self._run("allreduce", tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Overwrite with the root's."""
        return self._run("broadcast", tensors, opts)

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """Collect the tensors of all ranks."""
        return self._run("allgather", outputs, tensors, opts or dist.AllgatherOptions())

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        return self._run("_allgather_base", output, tensor, opts or dist.AllgatherOptions())

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        return self._run("_reduce_scatter_base", output, tensor, opts or dist.ReduceScatterOptions())

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names in torch 2.13

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
    """Register the device, as the import of torch does if torch_tpu is installed."""
    functions = {name: globals()[name] for name in (*INSTEAD, "stream", "Stream", "Event")}
    make = late.late
    late.late = lambda data: (_claim(), make(data))[1]
    late.register("tpu", **functions)
    torch.accelerator.set_device_index = set_device.__wrapped__  # torch's own end in C++
    torch.accelerator.current_device_index = current_device.__wrapped__
    torch.tpu.distributed = sys.modules["torch.tpu.distributed"] = distributed = ModuleType("torch.tpu.distributed")
    sys.modules["torch.tpu"] = torch.tpu
    distributed.set_tpu_launch_env = set_tpu_launch_env
    dist.Backend.register_backend("tpu_dist", OverGloo, devices=["tpu"])
