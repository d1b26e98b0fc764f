"""Distributes two layers over the ranks of a learner according to the device mesh of its strategy."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def spread(layers: nn.Sequential, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism, sharding, or both.

    Args:
        layers: linear, anything, linear.
        mesh: mesh with the dimensions of Lightning's `ModelParallelStrategy`.
    """
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    if tensor.size() > 1:
        parallelize_module(layers, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if data.size() > 1:
        for layer in (layers[0], layers):
            fully_shard(layer, mesh=data)
