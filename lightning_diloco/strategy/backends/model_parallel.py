"""A learner whose devices shard the model: FSDP2, tensor parallel or both, as the module's `configure_model` decides.

1. A rank's part of a parameter is a box of a DTensor.
2. Ranks of one tensor parallel group read the same samples, which are counted once.
3. The local tensor of a DTensor is read again at each use. With uneven shards, FSDP2 of torch 2.9 replaces the local
   tensor at the first forward. A change to the old local tensor would not change the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_diloco.devices.part import Box
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.backends.sharded import ShardedHooks


class ModelParallelDiLoCo(ShardedHooks, ModelParallelStrategy):
    """A learner with several devices, each with a part of the model."""

    _inner = ModelParallelStrategy

    def _check_devices(self, devices: Sequence[torch.device], num_nodes: int) -> None:
        """Check that the mesh has as many places as there are devices on all nodes."""
        super()._check_devices(devices, num_nodes)
        given = {
            "data_parallel_size": (self._data_parallel_size, num_nodes),
            "tensor_parallel_size": (self._tensor_parallel_size, len(devices)),
        }
        sizes = {name: auto if size == "auto" else int(size) for name, (size, auto) in given.items()}
        if prod(sizes.values()) != len(devices) * num_nodes:
            found = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise ConfigError(
                f"{found} with {len(devices) * num_nodes} device(s): their product must be the number of devices "
                "('auto' is the number of nodes and of devices of a node); change one of them, or "
                "Trainer(devices=..., num_nodes=...)"
            )

    def _held(self) -> dict[str, tuple[Tensor, Box]]:
        parts = self._live_parts()
        return {name: (parts[name], box(name, param)) for name, param in self._present.params.items()}

    def _live_parts(self) -> Mapping[str, Tensor]:
        return LocalTensors(self._present.params)

    def _drop_gathered(self) -> None:
        assert self.model is not None
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @cached_property  # slicing a mesh makes a new object, and every step reads this
    def _counts_tokens(self) -> bool:
        return self.device_mesh["tensor_parallel"].get_local_rank() == 0


class LocalTensors(Mapping[str, Tensor]):
    """This rank's parts of parameters, see rule 3.

    Args:
        params: parameters by name, DTensors or plain tensors.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params

    def __getitem__(self, name: str) -> Tensor:
        param = self._params[name]
        with torch.no_grad():
            return (param.to_local() if isinstance(param, DTensor) else param).detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def box(name: str, param: Tensor) -> Box:
    """Return this rank's box of a parameter.

    Raises:
        ConfigError: this rank's part is not a box.
    """
    firsts, sizes = [0] * param.dim(), list(param.shape)
    if not isinstance(param, DTensor):
        return tuple(firsts), tuple(sizes)
    mesh, placements = param.device_mesh, param.placements
    # FSDP2 shards what tensor parallel leaves to a rank, although FSDP2's mesh dimension comes first.
    by_cut = sorted(range(mesh.ndim), key=lambda k: type(placements[k]).__name__ == "_StridedShard")
    for k in by_cut:
        if (dim := getattr(placements[k], "dim", None)) is None:
            continue
        each = -(-sizes[dim] // mesh.size(k))
        start = min(each * mesh.get_local_rank(k), sizes[dim])
        firsts[dim], sizes[dim] = firsts[dim] + start, min(each, sizes[dim] - start)
    if any(placement.is_partial() for placement in placements) or tuple(sizes) != tuple(param.to_local().shape):
        raise ConfigError(
            f"{name} of shape {tuple(param.shape)} is laid out as {placements}: each rank must hold one box of it; cut "
            "it by fully_shard or parallelize_module, or by both in this order: first tensor parallel, then FSDP2"
        )
    return tuple(firsts), tuple(sizes)
