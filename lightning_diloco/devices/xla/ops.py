"""Interface to torch_xla, which no other module imports.

1. Only the training thread traces operations and calls `sync`. Every graph it traces ends with its own `sync`.
2. Any thread may call `upload`. Any thread may call `.cpu()` on a tensor that a `sync` has materialized and that
   nothing writes to.
3. A graph must not depend on the position of its rows in a parameter. Otherwise every fragment would be compiled
   separately. The start row is therefore a tensor (`rows_of`, `with_rows`).
4. With several devices (SPMD), `.cpu()` would gather a sharded tensor on the device, in an extra graph. Any thread may
   call `fetch` instead, which copies shard by shard. On several hosts it copies the shards of this host.
5. The default device of torch_xla is set per thread, so `upload` from another thread would go to the first device.
   `use_device` sets the learner's device for all threads.
6. The compilers of some devices remove a cast to bfloat16 and back unless there is an optimization barrier in between.

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
    """Set the device of later uploads; has no effect on a mesh.

    Args:
        index: index among the devices of this process.
    """
    global _device_index
    _device_index = index


def sync() -> None:
    """Send the traced graph to the device and return before it has finished. Training thread."""
    torch_xla.sync()


def upload(*tensors: Tensor, dim: int | None = None) -> list[Tensor]:
    """Copy host tensors to new buffers on the device, without tracing. Any thread.

    Args:
        tensors: tensors on the host.
        dim: with several devices, the dimension to shard along; None replicates the tensors.
    """
    if not is_mesh():
        return list(xm.send_cpu_data_to_device(list(tensors), torch.device("xla", _device_index)))
    layouts = [spmd.ShardingSpec(_mesh(), _partition(tensor, dim)) for tensor in tensors]
    return [
        xm.send_cpu_data_to_device([tensor], torch_xla.device(), input_sharding=layout)[0]
        for tensor, layout in zip(tensors, layouts, strict=True)
    ]


def upload_samples(tensor: Tensor) -> Tensor:
    """Upload this host's part of a batch and return the whole batch, sharded over all devices by samples.

    Args:
        tensor: equally large on all hosts, samples along dimension 0. A scalar must be the same on all hosts.

    Raises:
        ConfigError: the number of samples is not a multiple of this host's devices.
    """
    if not tensor.dim():
        return upload(tensor)[0]
    if len(tensor) % num_local_devices():
        raise ConfigError(
            f"a batch of shape {tuple(tensor.shape)} on a host with {num_local_devices()} devices: each host's part of "
            "a batch must be a multiple of its devices; change batch_size and set drop_last=True"
        )
    layout = spmd.ShardingSpec(_mesh(), _partition(tensor, 0), minibatch=True)
    return xm.send_cpu_data_to_device([tensor], torch_xla.device(), input_sharding=layout)[0]


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors to the host, shard by shard if there are several devices. Any thread, see rules 2 and 4.

    With several devices, this waits once for all enqueued work, and no new work starts on the devices during the wait.
    One call for several tensors is therefore cheaper than several calls.

    Returns:
        The tensors, with zeros for elements that are only on other hosts.
    """
    if not is_mesh():
        return [tensor.cpu() for tensor in tensors]
    xm.wait_device_ops()
    return [_joined(tensor) for tensor in tensors]


def use_mesh() -> int:
    """Switch SPMD on and return the number of devices.

    Raises:
        ConfigError: tensors were already created on a single device.
    """
    if not is_mesh():
        if torch_xla._XLAC._xla_get_spmd_config_is_locked():
            raise ConfigError(
                "several XLA devices were requested after tensors were made on one: SPMD must be switched on before; "
                "make the Trainer before anything is moved to an XLA device, or call torch_xla.runtime.use_spmd() first"
            )
        xr.use_spmd()
    return int(xr.global_runtime_device_count())


def num_mesh_devices() -> int:
    """Return the number of devices in the mesh; 1 without SPMD."""
    return int(xr.global_runtime_device_count()) if is_mesh() else 1


def is_mesh() -> bool:
    """Return whether SPMD is on."""
    return bool(xr.is_spmd())


def host() -> tuple[int, int]:
    """Return (index of this host, number of hosts); each host runs one process of the same program."""
    return int(xr.process_index()), int(xr.process_count())


def own_rows() -> list[int]:
    """Return the rows on this host of a tensor that is sharded with one row per device."""
    (tensor,) = upload(torch.zeros(num_mesh_devices(), 1, dtype=torch.float32), dim=0)
    return sorted(place[0].start for _, place in _shards(tensor))


def meet_hosts() -> None:
    """Initialize torch.distributed (gloo) over all hosts; TPU hosts find the first host, others need MASTER_ADDR."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="xla://")  # torch_xla's rendezvous, one rank per process


def shard(tensor: Tensor, dim: int | None) -> None:
    """Shard a tensor over all devices along one dimension, or replicate it (None). Training thread.

    A dimension that is not a multiple of the number of devices is padded.
    """
    spmd.mark_sharding(tensor, _mesh(), _partition(tensor, dim))


def sharded_dim(tensor: Tensor) -> int | None:
    """Return the dimension along which a tensor is sharded; None if it is replicated."""
    if not is_mesh():
        return None
    tiles = re.search(r"devices=\[([\d,]+)\]", torch_xla._XLAC._get_xla_sharding_spec(tensor))
    sizes = [int(size) for size in tiles[1].split(",")] if tiles else []
    return next((dim for dim, size in enumerate(sizes[: tensor.dim()]) if size > 1), None)


def cast_and_back(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to dtype and return it as float32. Training thread."""
    if dtype == torch.float32:
        return x
    rounded = x.to(dtype)
    xm.optimization_barrier_([rounded])
    return rounded.float()


def rows_of(tensor: Tensor, start: Tensor, num_rows: int) -> Tensor:
    """Return rows of a tensor; the start is a device scalar, so one graph serves all starts. Training thread.

    Args:
        tensor: any shape with at least one dimension.
        start: first row, int32 scalar on the device.
        num_rows: number of rows.
    """
    program = _rows_of(tensor.shape, tensor.dtype, num_rows)
    return torch_xla._XLAC._xla_user_computation("xla::diloco_rows_of", [tensor, start], program)[0]


def with_rows(tensor: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """Return the tensor with some rows replaced; see `rows_of`. Training thread."""
    program = _with_rows(tensor.shape, tensor.dtype, len(rows))
    return torch_xla._XLAC._xla_user_computation("xla::diloco_with_rows", [tensor, rows, start], program)[0]


def num_compilations() -> int:
    """Return the number of graphs that this process has compiled."""
    data = metrics.metric_data("CompileTime")
    return int(data[0]) if data else 0


def num_local_devices() -> int:
    """Return the number of devices of this process."""
    return int(xr.addressable_runtime_device_count())


def keep_compilations() -> bool:
    """Enable the persistent compilation cache, in XLA_PERSISTENT_CACHE_PATH or else in the user's cache folder.

    Returns:
        Whether the cache is enabled. It is enabled only on TPU, and only if no computation has run yet. Programs for
        CPU cannot be loaded from a cache.
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
    """Return this host's shards, each with its place in the tensor (Ellipsis for the whole tensor)."""
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
    """Build a computation of tensors and a start row; cached by callers, faster than torch_xla's own registry."""
    kinds = [xb.mkshape(xb.Op.from_torch_type(dtype), list(shape)) for shape in shapes]
    return xb.create_computation("diloco", lower, [*kinds, xb.mkshape(xb.Type.S32, [])])


def _starts(tensor: Any, start: Any) -> Sequence[Any]:
    zero = xb.Op.zero(start.builder(), start.shape().dtype)
    return [start] + [zero] * (len(tensor.shape().sizes) - 1)
