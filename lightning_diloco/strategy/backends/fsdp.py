"""A learner whose devices shard the model by FSDP1 (`FullyShardedDataParallel`).

1. A rank holds a range of the elements of each parameter. The range may be empty; torch knows where it begins. Each
   parameter stays an object of its own (`use_orig_params`, Lightning's default), and its memory does not move.
2. The model description has the shapes of whole parameters.
3. On a CPU, FSDP needs an explicit device, and nothing is offloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._runtime_utils import _reshard

from lightning_diloco.devices.part import Box
from lightning_diloco.errors import ConfigError
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.strategy.backends.sharded import ShardedHooks
from lightning_diloco.strategy.trainer.parameters import describe

_SUPPORTED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


class FSDPDiLoCo(ShardedHooks, FSDPStrategy):
    """A learner with several devices, each with a part of the model."""

    _inner = FSDPStrategy

    def _check_devices(self, devices: Sequence[torch.device], num_nodes: int) -> None:
        super()._check_devices(devices, num_nodes)
        if len(devices) * num_nodes == 1:
            raise ConfigError(
                "inner=FSDPStrategy() with 1 device: it shares a model among several; pass Trainer(devices=2), or no "
                "inner"
            )

    # --- shards --------------------------------------------------------------------------------------------------

    def _held(self) -> dict[str, tuple[Tensor, Box]]:
        return {name: (param, self._box(param)) for name, param in self._present.params.items()}

    def _box(self, param: Tensor) -> Box:
        if id(param) not in self._cut:  # FSDP ignores this parameter
            return (0,) * param.dim(), tuple(param.shape)
        return (self._cut[id(param)][1],), (param.numel(),)

    def _shape(self, param: Tensor) -> tuple[int, ...]:
        return self._cut[id(param)][0] if id(param) in self._cut else tuple(param.shape)

    def _whole(self, param: Tensor) -> Tensor:
        """Return the whole parameter; all ranks call this together."""
        if id(param) not in self._cut:
            return param
        shape, first = self._cut[id(param)]
        whole = param.new_zeros(shape).view(-1)
        whole[first : first + param.numel()] = param.detach()
        dist.all_reduce(whole.view(torch.uint8), dist.ReduceOp.MAX)  # each byte comes from one rank
        return whole.view(shape)

    def _join(self) -> None:
        self._cut = {
            id(param): (tuple(shape), info.intra_param_start_idx or 0)
            for _, handle in self._wrappers()
            for param, shape, info in _parameters(handle.flat_param)
        }
        super()._join()

    def _describe(self) -> ModelDescription:
        assert self.lightning_module is not None
        options = {"params": self._present.params, "shape": self._shape, "whole": self._whole}
        return describe(self.lightning_module, self._present.counter.unit, **options)

    def _drop_gathered(self) -> None:
        for module, handle in self._wrappers():
            if module._is_root is not None:  # None before the first forward
                _reshard(module, handle, True)

    def _wrappers(self) -> list[tuple[FullyShardedDataParallel, FlatParamHandle]]:
        assert self.model is not None
        found = FullyShardedDataParallel.fsdp_modules(self.model)
        return [(module, module._handle) for module in found if module._handle is not None]

    # --- CPU -----------------------------------------------------------------------------------------------------

    def _inner_state_dict(self) -> dict[str, Any]:
        if self.root_device.type != "cpu" or self._state_dict_type != "full":
            return super()._inner_state_dict()
        assert self.model is not None
        # Lightning sets offload_to_cpu=True. For tensors on the CPU, FSDP would then free memory that it reads later.
        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, config):
            return self.model.state_dict()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """See `FSDPStrategy._setup_model`. The CPU has no device index, so the model is wrapped here."""
        policy = {}
        if self.root_device.type == "cpu" and not FullyShardedDataParallel.fsdp_modules(model):
            model = FullyShardedDataParallel(
                model,
                mixed_precision=self.mixed_precision_config,
                sharding_strategy=self.sharding_strategy,
                device_id=self.root_device,
                **self.kwargs,
            )
            policy = {name: self.kwargs.pop(name) for name in ("auto_wrap_policy",) if name in self.kwargs}
        try:
            return super()._setup_model(model)
        finally:
            self.kwargs.update(policy)


def problems(inner: FSDPStrategy) -> list[str]:
    """Return the problems of an FSDP strategy's options, one sentence each."""
    found = []
    if inner.sharding_strategy not in _SUPPORTED:
        allowed = " or ".join(strategy.name for strategy in _SUPPORTED)
        found.append(
            f"inner=FSDPStrategy(sharding_strategy={inner.sharding_strategy.name!r}): must be {allowed}, where each "
            "rank holds one part; use one of them, or DDPStrategy() for whole models"
        )
    if inner.cpu_offload.offload_params:
        found.append(
            "inner=FSDPStrategy(cpu_offload=True): must be False, because it moves parameters when training begins; "
            "leave it out, and shard over more devices"
        )
    if not inner.kwargs["use_orig_params"]:
        found.append(
            "inner=FSDPStrategy(use_orig_params=False): must be True, so that parameters have names; leave it out"
        )
    return found


def _parameters(flat: Any) -> list[tuple[nn.Parameter, torch.Size, Any]]:
    """Return each parameter with its whole shape and the position of this rank's range.

    Raises:
        ConfigError: a parameter is not contiguous, so FSDP has flattened it in another order than that of its elements.
    """
    if not all(flat._contiguities):
        names = [name for name, is_so in zip(flat._fqns, flat._contiguities, strict=True) if not is_so]
        raise ConfigError(
            f"{', '.join(names)} under FSDP: parameters must be contiguous, so that each rank holds a range of their "
            "elements; call .contiguous() on them, or use inner=ModelParallelStrategy() (FSDP2)"
        )
    return list(zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True))
