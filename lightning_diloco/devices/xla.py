"""All that is taken from torch_xla; no other module imports it.

1. Only the training thread traces operations and calls `sync`. Every graph it makes ends with its own `sync`.
2. Any thread may `upload`, and may call `.cpu()` on a tensor that a `sync` has made and that nothing writes to.
3. A graph must not depend on where in a parameter its rows lie: where they start is data (`rows_of`, `with_rows`), or
   every fragment would be compiled anew.
4. A cast to bfloat16 and back is taken out by the compiler of some devices unless a barrier stands between.

Source: measured with torch_xla 2.9 on PJRT CPU; rule 4: `xla_allow_excess_precision`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
import torch_xla.core.xla_op_registry as ops
import torch_xla.runtime as xr
from torch import Tensor
from torch_xla.debug import metrics


def sync() -> None:
    """Hand what was traced to the device; returns before it is done. Training thread."""
    torch_xla.sync()


def upload(*tensors: Tensor) -> list[Tensor]:
    """Host tensors on the device, in buffers of their own; nothing is traced. Any thread."""
    return list(xm.send_cpu_data_to_device(list(tensors), torch_xla.device()))


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
    return _ROWS_OF(tensor, start, num_rows=num_rows)


def with_rows(tensor: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """The tensor with some rows replaced, see `rows_of`. Training thread."""
    return _WITH_ROWS(tensor, rows, start)


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


def _starts(tensor: Any, start: Any) -> Sequence[Any]:
    zero = xb.Op.zero(start.builder(), start.shape().dtype)
    return [start] + [zero] * (len(tensor.shape().sizes) - 1)


def _lower_rows_of(tensor: Any, start: Any, *, num_rows: int) -> Any:
    return tensor.dynamic_slice(_starts(tensor, start), [num_rows, *tensor.shape().sizes[1:]])


def _lower_with_rows(tensor: Any, rows: Any, start: Any) -> Any:
    return tensor.dynamic_update_slice(rows, _starts(tensor, start))


_ROWS_OF = ops.register("diloco::rows_of", _lower_rows_of)
_WITH_ROWS = ops.register("diloco::with_rows", _lower_with_rows)
