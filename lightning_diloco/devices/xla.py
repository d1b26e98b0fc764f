"""All that is taken from torch_xla; no other module imports it.

1. Only the training thread traces operations and calls `sync`. Every graph it makes ends with its own `sync`.
2. Any thread may `upload`, and may call `.cpu()` on a tensor that a `sync` has made and that nothing writes to.
3. A graph must not depend on where in a parameter its rows lie: where they start is data (`rows_of`, `with_rows`), or
   every fragment would be compiled anew.
4. With several devices (SPMD) `.cpu()` would gather a sharded tensor on the device, by a graph of its own. Any thread
   may `fetch` it instead, shard by shard. On several hosts that is what lies on the devices of this one.
5. Which device torch_xla takes by itself is each thread's own choice: another thread than that which chose one would
   `upload` to the first. The learner's is chosen here, for all threads (`use_device`).
6. A cast to bfloat16 and back is taken out by the compiler of some devices unless a barrier stands between.

Source: measured with torch_xla 2.9 on PJRT CPU; rule 6: `xla_allow_excess_precision`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor
from torch_xla.debug import metrics
from torch_xla.distributed import spmd

from lightning_diloco.errors import ConfigError

_device_index = 0


def use_device(index: int) -> None:
    """Upload to this one of the process's devices from now on; over a mesh, there is no choice.

    Args:
        index: among the devices of this process.
    """
    global _device_index
    _device_index = index


def sync() -> None:
    """Hand what was traced to the device; returns before it is done. Training thread."""
    torch_xla.sync()


def upload(*tensors: Tensor, dim: int | None = None) -> list[Tensor]:
    """Host tensors on the device, in buffers of their own; nothing is traced. Any thread.

    Args:
        tensors: on the host.
        dim: with several devices, the dimension along which each gets its own part only; None: all of it.
    """
    if not is_mesh():
        return list(xm.send_cpu_data_to_device(list(tensors), torch.device("xla", _device_index)))
    layouts = [spmd.ShardingSpec(_mesh(), _partition(tensor, dim)) for tensor in tensors]
    return [
        xm.send_cpu_data_to_device([tensor], torch_xla.device(), input_sharding=layout)[0]
        for tensor, layout in zip(tensors, layouts, strict=True)
    ]


def upload_samples(tensor: Tensor) -> Tensor:
    """This host's part of a batch, of which all hosts have as much: the whole batch, each device having some samples.

    Args:
        tensor: on the host, samples along dimension 0; a scalar is the same on all hosts.

    Raises:
        ConfigError: the devices of this host cannot share its samples.
    """
    if not tensor.dim():
        return upload(tensor)[0]
    if len(tensor) % num_local_devices():
        raise ConfigError(
            f"a batch of shape {tuple(tensor.shape)} on a host with {num_local_devices()} devices: each host's part of "
            "a batch must be a multiple of its devices; change batch_size, and set drop_last=True"
        )
    layout = spmd.ShardingSpec(_mesh(), _partition(tensor, 0), minibatch=True)
    return xm.send_cpu_data_to_device([tensor], torch_xla.device(), input_sharding=layout)[0]


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Copies on the host; of several devices each sends its own part. Any thread, see rules 2 and 4.

    With several devices this waits for all that was handed to them, and nothing new begins there meanwhile: once for
    all tensors.

    Returns:
        The tensors; zero where they lie on other hosts only.
    """
    if not is_mesh():
        return [tensor.cpu() for tensor in tensors]
    xm.wait_device_ops()
    return [_joined(tensor) for tensor in tensors]


def use_mesh() -> int:
    """Compute as one program over all devices from now on, and return how many there are.

    Raises:
        ConfigError: tensors were made on a single device before.
    """
    if not is_mesh():
        if torch_xla._XLAC._xla_get_spmd_config_is_locked():
            raise ConfigError(
                "several XLA devices were asked for after tensors were made on one: SPMD must be switched on before; "
                "make the Trainer before anything is moved to an XLA device, or call torch_xla.runtime.use_spmd() first"
            )
        xr.use_spmd()
    return int(xr.global_runtime_device_count())


def num_mesh_devices() -> int:
    """Devices over which one program computes."""
    return int(xr.global_runtime_device_count()) if is_mesh() else 1


def is_mesh() -> bool:
    """Whether one program computes over all devices."""
    return bool(xr.is_spmd())


def host() -> tuple[int, int]:
    """(number of this host, number of hosts): one process on each, all running the same program."""
    return int(xr.process_index()), int(xr.process_count())


def own_rows() -> list[int]:
    """Which rows of a tensor that lies over all devices, one row on each, are on this host."""
    (tensor,) = upload(torch.zeros(num_mesh_devices(), 1, dtype=torch.float32), dim=0)
    return sorted(place[0].start for _, place in _shards(tensor))


def meet_hosts() -> None:
    """Let torch.distributed know all hosts, on the CPU; TPU hosts find the first one, others by MASTER_ADDR."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="xla://")  # torch_xla's rendezvous: a rank for each process


def shard(tensor: Tensor, dim: int | None) -> None:
    """Lay a tensor out over all devices along one dimension, or whole on each (None). Training thread.

    A dimension that the number of devices does not divide is padded.
    """
    spmd.mark_sharding(tensor, _mesh(), _partition(tensor, dim))


def sharded_dim(tensor: Tensor) -> int | None:
    """Along which dimension a tensor is laid out; None: whole on every device."""
    if not is_mesh():
        return None
    tiles = re.search(r"devices=\[([\d,]+)\]", torch_xla._XLAC._get_xla_sharding_spec(tensor))
    sizes = [int(size) for size in tiles[1].split(",")] if tiles else []
    return next((dim for dim, size in enumerate(sizes[: tensor.dim()]) if size > 1), None)


def cast_and_back(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to dtype, as float32. Training thread."""
    if dtype == torch.float32:
        return x
    rounded = x.to(dtype)
    xm.optimization_barrier_([rounded])
    return rounded.float()


def rows_of(tensor: Tensor, start: Tensor, num_rows: int) -> Tensor:
    """Rows of a tensor, from a start that lies on the device: one graph for all starts. Training thread.

    Args:
        tensor: any shape with a dimension 0.
        start: int32 scalar, first row.
        num_rows: number of rows.
    """
    program = _rows_of(tensor.shape, tensor.dtype, num_rows)
    return torch_xla._XLAC._xla_user_computation("xla::diloco_rows_of", [tensor, start], program)[0]


def with_rows(tensor: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """The tensor with some rows replaced, see `rows_of`. Training thread."""
    program = _with_rows(tensor.shape, tensor.dtype, len(rows))
    return torch_xla._XLAC._xla_user_computation("xla::diloco_with_rows", [tensor, rows, start], program)[0]


def num_compilations() -> int:
    """Graphs compiled by this process so far."""
    data = metrics.metric_data("CompileTime")
    return int(data[0]) if data else 0


def num_local_devices() -> int:
    """Devices of this process."""
    return int(xr.addressable_runtime_device_count())


def keep_compilations() -> bool:
    """Keep compiled graphs on disk from one process to the next; where people said, else in the cache folder.

    Returns:
        Whether they are kept; not if something was computed before, nor by a CPU, whose programs cannot be loaded.
    """
    if xr.device_type() != "TPU" or torch_xla._XLAC._xla_computation_cache_is_initialized():
        return False
    if not os.environ.get("XLA_PERSISTENT_CACHE_PATH"):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        xr.initialize_cache(str(cache / "lightning_diloco" / "xla"))
    return True


@cache
def _mesh() -> spmd.Mesh:
    count = xr.global_runtime_device_count()
    return spmd.Mesh(range(count), (count,), ("all",))


def _shards(tensor: Tensor) -> list[tuple[Tensor, Any]]:
    """What lies on this host's devices, and where in the tensor; Ellipsis: it is the whole."""
    (shards,) = torch_xla._XLAC._get_local_shards([tensor])
    (places,) = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])
    return [(values, place) for (values, _), (_, place) in zip(shards, places, strict=True)]


def _joined(tensor: Tensor) -> Tensor:
    out = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for values, place in _shards(tensor):
        if place is Ellipsis:
            return out.copy_(values)
        out[tuple(place)] = values[tuple(slice(part.stop - part.start) for part in place)]
    return out


def _partition(tensor: Tensor, dim: int | None) -> tuple[str | None, ...]:
    return tuple("all" if k == dim else None for k in range(tensor.dim()))


@cache
def _rows_of(shape: torch.Size, dtype: torch.dtype, num_rows: int) -> Any:
    return _program(lambda x, start: x.dynamic_slice(_starts(x, start), [num_rows, *shape[1:]]), [shape], dtype)


@cache
def _with_rows(shape: torch.Size, dtype: torch.dtype, num_rows: int) -> Any:
    shapes = [shape, torch.Size([num_rows, *shape[1:]])]
    return _program(lambda x, rows, start: x.dynamic_update_slice(rows, _starts(x, start)), shapes, dtype)


def _program(lower: Callable[..., Any], shapes: Sequence[torch.Size], dtype: torch.dtype) -> Any:
    """Of tensors and where rows start; kept here: torch_xla's own registry takes longer to find it than to trace it."""
    kinds = [xb.mkshape(xb.Op.from_torch_type(dtype), list(shape)) for shape in shapes]
    return xb.create_computation("diloco", lower, [*kinds, xb.mkshape(xb.Type.S32, [])])


def _starts(tensor: Any, start: Any) -> Sequence[Any]:
    zero = xb.Op.zero(start.builder(), start.shape().dtype)
    return [start] + [zero] * (len(tensor.shape().sizes) - 1)
