"""A learner whose devices share the model: FSDP2, as the module's `configure_model` says.

1. Each rank exchanges what it holds of a parameter, a box of a DTensor. Nothing gathers the model.
2. Checkpoints hold the anchor, sharded or full as the inner strategy does it. Local parameters are not saved: whoever
   resumes alone goes on from the anchor.
3. Tensor parallel is refused until it has been tried. What is here for it: columns of a parameter are a box, too, and
   ranks of one group read the same samples, which count once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.devices.part import Box, CpuPart, CudaPart
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.ranks import RanksHooks


class ModelParallelDiLoCo(RanksHooks, ModelParallelStrategy):
    """A learner with several CPU or CUDA devices, each with a part of the model."""

    _anchor_is_shown = False

    # --- start ---------------------------------------------------------------------------------------------------

    def _part_boxes(self) -> dict[str, Box]:
        if self._learner.align != "carry":
            raise ConfigError(
                f"align={self._learner.align!r} with {type(self).__name__}: must be 'carry', which needs no residual; "
                "leave align out, or use inner=DDPStrategy()"
            )
        return {name: box(name, param) for name, param in self._params.items()}

    def _make_device(self, plan: FragmentPlan, config: RunConfig) -> FragmentDevice:
        local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in self._params.items()}
        part = CudaPart if self.root_device.type == "cuda" else CpuPart
        self._device = part(
            plan, {name: p.detach() for name, p in local.items()}, config, self._learner, self._part_boxes()
        )
        return self._device

    @property
    def _counts_tokens(self) -> bool:
        return self.device_mesh["tensor_parallel"].get_local_rank() == 0

    # --- anchors for validation and checkpoints ------------------------------------------------------------------

    def _set_evaluating(self, evaluating: bool) -> None:
        super()._set_evaluating(evaluating)
        self._anchor_is_shown = evaluating and self._learner.evaluate == "anchor"

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with the anchor in place of the local parameters."""
        if self._device is None or self._anchor_is_shown:
            return ModelParallelStrategy.lightning_module_state_dict(self)
        self._device.show_anchor()
        try:
            state = ModelParallelStrategy.lightning_module_state_dict(self)
            return tree_map_only(Tensor, torch.clone, state)  # on a CPU these were the parameters themselves
        finally:
            self._device.show_local()

    def _local_parameters(self) -> dict[str, Tensor]:
        return {}


def box(name: str, param: Tensor) -> Box:
    """What this rank holds of a parameter.

    Raises:
        ConfigError: not a box.
    """
    if not isinstance(param, DTensor):
        return (0,) * param.dim(), tuple(param.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    kinds = {type(placement).__name__ for placement in param.placements}
    shape, first = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    if not kinds <= {"Shard", "Replicate"} or tuple(shape) != tuple(param.to_local().shape):
        raise ConfigError(
            f"{name} of shape {tuple(param.shape)} is laid out as {param.placements}: each rank must hold one box, so "
            "no dimension may be cut twice; cut rows by FSDP2 and columns by tensor parallel, or use one of them"
        )
    return tuple(first), tuple(shape)


def check_mesh(strategy: ModelParallelStrategy, num_ranks: int) -> None:
    """Compare the mesh with the Trainer's devices.

    Raises:
        ConfigError: its size is another one.
    """
    sizes: Mapping[str, Any] = {
        "data_parallel_size": strategy._data_parallel_size,
        "tensor_parallel_size": strategy._tensor_parallel_size,
    }
    found = ", ".join(f"{name}={size}" for name, size in sizes.items())
    known = [size for size in sizes.values() if size != "auto"]
    if len(known) == 2 and known[0] * known[1] != num_ranks:
        raise ConfigError(
            f"{found} with {num_ranks} device(s): their product must be the number of devices; change one of them, or "
            "Trainer(devices=..., num_nodes=...)"
        )
    if strategy._tensor_parallel_size != 1:
        raise ConfigError(
            f"{found}: tensor parallel inside a learner has not been tried, so tensor_parallel_size must be 1; pass "
            f"ModelParallelStrategy(data_parallel_size={num_ranks}, tensor_parallel_size=1)"
        )
