"""An accelerator that runs everything as late as it may, registered through PyTorch's interface for Python back ends.

1. Operations on its tensors only enter the queue of the thread's current stream. Nothing runs until the host waits for
   a stream, an event or a value. So code that forgets an event reads memory that is not written yet, which is NaN here.
2. Data are held by CPU tensors (`_data`, by the storage that stands for them). Views share them. Shapes are known at
   once, values come later.
3. `waits` lists the threads that have waited for the device.
4. Copies from host memory read it when they run, as copies from pinned memory do, unless they block.
5. With `has_double = False`, a float64 tensor on the device is an error, as on devices without this type.

PyTorch knows one such back end per process, so tests run it in a process of its own. The interface for Python back ends
is not in torch 2.9; it is in 2.13. The module itself can be imported with both.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map

NAME = "late"
waits: list[str] = []
imprecise = False  # whether results have only the digits of bfloat16
has_double = True
_running = threading.RLock()
_own = threading.local()
_libraries: list[torch.library.Library] = []
_data: dict[int, torch.Tensor] = {}


class Stream:
    """A queue of operations."""

    def __init__(self, device: object = None) -> None:
        self._queue: deque[Callable[[], object]] = deque()
        self.num_queued = self.num_done = 0
        streams.append(self)

    def add(self, work: Callable[[], object]) -> None:
        """Queue an operation."""
        self._queue.append(work)
        self.num_queued += 1

    def run(self, until: int) -> None:
        """Run operations until this many are done."""
        with _running:
            while self.num_done < until:
                self._queue.popleft()()
                self.num_done += 1

    def synchronize(self) -> None:
        """Wait, on the host."""
        waits.append(threading.current_thread().name)
        self.run(self.num_queued)

    def query(self) -> bool:
        """Return whether all operations are done."""
        return self.num_done == self.num_queued

    def wait_event(self, event: Event) -> None:
        """Wait for an event, in this stream."""
        stream, number = event.stream, event.number
        self.add(lambda: stream.run(number))


class Event:
    """A position in a stream."""

    def record(self, stream: Stream) -> None:
        """Mark the end of the queued operations."""
        self.stream, self.number = stream, stream.num_queued

    def synchronize(self) -> None:
        """Wait, on the host."""
        waits.append(threading.current_thread().name)
        self.stream.run(self.number)


streams: list[Stream] = []
default = Stream()


def current() -> Stream:
    """The current stream of this thread."""
    return getattr(_own, "stream", default)


@contextmanager
def stream(chosen: Stream) -> Any:
    """Make a stream the current one of this thread."""
    before = current()
    _own.stream = chosen
    yield
    _own.stream = before


def late(data: torch.Tensor) -> torch.Tensor:
    """Return a tensor of this device with these data."""
    if data.dtype == torch.float64 and not has_double:
        raise TypeError(f"{NAME} does not support float64")
    tensor: torch.Tensor = torch._C._acc.create_empty_tensor(tuple(data.shape), data.dtype)
    _data[tensor.untyped_storage()._cdata] = data
    return tensor


def _is_late(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def raw(value: Any) -> Any:
    """Return the data of a tensor of this device, which may not be computed yet; other values as they are."""
    return _data[value.untyped_storage()._cdata] if _is_late(value) else value


def _meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _late(value: Any) -> Any:
    return late(value) if isinstance(value, torch.Tensor) else value


def _unwritten(like: Any) -> Any:
    if not isinstance(like, torch.Tensor):
        return like
    data = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return data.fill_(torch.nan) if data.is_floating_point() else data.fill_(1)


def _rounded(found: Any) -> None:
    if imprecise and isinstance(found, torch.Tensor) and found.dtype == torch.float32:
        found.copy_(found.bfloat16())


def _any_operation(op: Any, *args: Any, **kwargs: Any) -> Any:
    returns, parameters = op._schema.returns, op._schema.arguments
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu", "pin_memory": False}
    raws, raw_options = tree_map(raw, args), tree_map(raw, kwargs)
    if op is torch.ops.aten._local_scalar_dense.default:
        current().synchronize()
        return op(*raws)
    given = [*args, *(kwargs.get(parameter.name) for parameter in parameters[len(args) :])]
    written = [x for x, parameter in zip(given, parameters, strict=True) if parameter.is_write]
    if written:
        if "out" in kwargs and not kwargs["out"].numel():  # the operation makes room for its result
            like = op(*tree_map(_meta, raws), **tree_map(_meta, raw_options))
            kwargs["out"].data = late(_unwritten(like))
            raw_options["out"] = raw(kwargs["out"])
        current().add(lambda: tree_map(_rounded, op(*raws, **raw_options)))
        return written[0] if len(returns) == 1 else tuple(written) if returns else None
    if not any(isinstance(x, torch.Tensor) for x in args):  # a factory
        return tree_map(lambda like: late(_unwritten(like)), op(*raws, **raw_options))
    if op is torch.ops.aten.as_strided.default:  # its offset counts from the beginning of the storage
        offset = (args[3] if len(args) > 3 else kwargs.get("storage_offset")) or 0
        return late(raws[0].as_strided(*raws[1:3], offset + raws[0].storage_offset()))
    if any(found.alias_info is not None for found in returns):  # a view
        return tree_map(_late, op(*raws, **raw_options))
    outputs = tree_map(_unwritten, op(*tree_map(_meta, raws), **tree_map(_meta, raw_options)))

    def compute() -> None:
        tree_map(lambda out, found: out.copy_(found), outputs, op(*raws, **raw_options))
        tree_map(_rounded, outputs)

    current().add(compute)
    return tree_map(_late, outputs)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    current().add(lambda: raw(target).copy_(raw(source)))
    if not non_blocking and not (_is_late(source) and _is_late(target)):
        current().synchronize()
    return target


def synchronize(device: object = None) -> None:
    """Wait, on the host, for everything."""
    waits.append(threading.current_thread().name)
    for each in list(streams):
        each.run(each.num_queued)


def _views() -> list[str]:
    """Names of the operations that return views. torch has kernels for some that would work on storages, not here."""
    implicit = torch._C._dispatch_has_kernel_for_dispatch_key
    return [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and name not in ("aten::detach", "aten::alias")  # the same elements of the same storage
        and any(r.alias_info is not None and not r.alias_info.is_write for r in _operation(name)._schema.returns)
        and not implicit(name, "CompositeImplicitAutograd")
    ]


def _operation(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def register(name: str = NAME, **functions: Any) -> None:
    """Make the device type known to torch, by a name and with functions of its module; once per process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    global NAME
    NAME = name
    module = SimpleNamespace(
        is_initialized=lambda: True,
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False,
        Stream=Stream,
        Event=Event,
        current_stream=lambda device=None: current(),
        stream=stream,
        synchronize=synchronize,
    )
    vars(module).update(functions)
    torch.accelerator.synchronize = synchronize  # torch's own ends in C++
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_any_operation, "PrivateUse1")
    copies = torch.library.Library("aten", "IMPL")
    copies.impl("_copy_from", _copy_from, "PrivateUse1")
    for view in _views():
        copies.impl(view, partial(_any_operation, _operation(view)), "PrivateUse1")
    _libraries.extend((everything, copies))
