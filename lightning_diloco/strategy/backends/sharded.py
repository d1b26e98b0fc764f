"""Learners whose devices shard the model: the common part of FSDP, FSDP2 and tensor parallel.

1. Each rank exchanges its part of each parameter. The model is never gathered.
2. Checkpoints hold the anchor, sharded or full as the inner strategy does it. They hold no local parameters, so a
   learner that begins a run from such a checkpoint begins with the anchor.
3. A forward without a backward may leave parameters gathered, and the next forward would use them again. They are
   dropped before the anchor and the local parameters change places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.devices.part import AcceleratorPart, Box, CpuPart
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.backends.ranks import RanksHooks

if TYPE_CHECKING:
    from lightning_diloco.learner.ranks.sharded_device import ShardedDevice


class ShardedHooks(RanksHooks):
    """Mixin: put it before one of Lightning's strategies that shard the model."""

    _holds_all = False

    def _held(self) -> dict[str, tuple[Tensor, Box]]:
        """Return this rank's part of each parameter by name, with its box in the parameter."""
        raise NotImplementedError

    def _live_parts(self) -> Mapping[str, Tensor]:
        """Return this rank's part of each parameter by name; each access yields the present tensor."""
        return {name: part.detach() for name, (part, _) in self._held().items()}

    # --- start ---------------------------------------------------------------------------------------------------

    def _check_devices(self, devices: Sequence[torch.device], num_nodes: int) -> None:
        super()._check_devices(devices, num_nodes)
        if self._learner.align != "carry":
            raise ConfigError(
                f"align={self._learner.align!r} with inner={self._inner.__name__}(): must be 'carry', which needs no "
                "residual that would have to be sharded, too; leave align out, or use inner=DDPStrategy()"
            )

    def _join(self) -> None:
        self._drop_gathered()
        super()._join()

    def _kind_of_device(self) -> type[ShardedDevice]:
        from lightning_diloco.learner.ranks.sharded_device import ShardedDevice

        return ShardedDevice

    def _part_boxes(self) -> dict[str, Box]:
        return {name: box for name, (_, box) in self._held().items()}

    def _make_device(self, plan: FragmentPlan, config: RunConfig) -> FragmentDevice[Any, Any]:
        params = self._live_parts()
        is_on_host = all(part.device.type == "cpu" for part in params.values())
        return (CpuPart if is_on_host else AcceleratorPart)(plan, params, config, self._learner, self._part_boxes())

    # --- anchors for validation and checkpoints ------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with the anchor in place of the local parameters."""
        if (fit := self._joined) is None or fit.validation.shows_anchor:
            return self._inner_state_dict()
        self._drop_gathered()
        fit.device.show_anchor()
        try:
            state = self._inner_state_dict()
            # On a CPU, these tensors share the parameters' memory.
            return {name: tree_map_only(Tensor, _copied, value) for name, value in state.items()}
        finally:
            fit.device.show_local()

    def _inner_state_dict(self) -> dict[str, Any]:
        return self._inner.lightning_module_state_dict(self)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state as the inner strategy does it; the checkpoint has no local parameters (rule 2)."""
        self._inner.load_model_state_dict(self, checkpoint, strict=strict)

    def _local_parameters(self) -> dict[str, Tensor]:
        return {}


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy; FSDP's sharded tensors support the method `clone` only, not `torch.clone`."""
    return tensor.clone()
