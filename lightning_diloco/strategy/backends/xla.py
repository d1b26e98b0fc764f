"""A learner on one XLA device, or on all devices of a host as one SPMD program; xla_hosts.py handles several hosts.

1. The traced graph ends after each inner step, micro-batch and validation batch. Otherwise it would grow with every
   batch, and XLA would compile a new graph for each number of batches.
2. For half precision, Lightning sets a switch that torch_xla no longer reads: training would stay in float32 without a
   warning. The module is converted here instead, as Lightning does on other devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.plugins import HalfPrecision, Precision, XLAPrecision
from lightning.pytorch.strategies import SingleDeviceXLAStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.backends.xla_accelerator import check_environment
from lightning_diloco.strategy.hooks import DiLoCoHooks

if TYPE_CHECKING:
    from lightning_diloco.devices.xla.fragments import XlaFragments


class XLAHalfPrecision(HalfPrecision, XLAPrecision):
    """Half precision for parameters, inputs and new tensors; optimizer steps as on XLA."""

    def __init__(self, precision: Any) -> None:
        HalfPrecision.__init__(self, precision)


def xla_precision(plugin: Precision | None) -> XLAPrecision:
    """Return the XLA counterpart of the precision plugin that Lightning has chosen.

    Raises:
        ConfigError: XLA has no such precision.
    """
    precision = "32-true" if plugin is None else plugin.precision
    if type(plugin) in (type(None), Precision, HalfPrecision, XLAPrecision, XLAHalfPrecision):
        if type(plugin) is XLAPrecision:
            plugin.teardown()  # resets the switches that it has set
        return XLAPrecision("32-true") if precision == "32-true" else XLAHalfPrecision(precision)
    raise ConfigError(
        f"precision={precision!r} ({type(plugin).__name__}) on XLA: must be '32-true', 'bf16-true' or '16-true'; "
        "pass Trainer(precision='bf16-true'), and keep in float32 what needs it by casting inside the module"
    )


class XLAHooks(DiLoCoHooks):
    """Mixin: ends graphs (rule 1), and logs the memory that anchors take."""

    def _make_device(self, plan: FragmentPlan, config: RunConfig) -> FragmentDevice[Any, Any]:
        device = super()._make_device(plan, config)
        rank_zero_info(cast("XlaFragments", device).memory())
        return device

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """End the graph of a micro-batch that does not step."""
        super().post_backward(closure_loss)
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization and self._trainer.fit_loop._should_accumulate():
            self._end_graph()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """End the graph with manual optimization, even if no optimizer stepped."""
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            self._end_graph()
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """End the graph of each batch."""
        return self._with_ended_graph(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """End the graph of each batch."""
        return self._with_ended_graph(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """End the graph of each batch."""
        return self._with_ended_graph(super().predict_step(*args, **kwargs))

    def _with_ended_graph(self, output: Any) -> Any:
        self._end_graph()
        return output

    def _end_graph(self) -> None:
        from lightning_diloco.devices.xla import ops as xla

        xla.sync()


class SingleDeviceXLADiLoCo(XLAHooks, SingleDeviceXLAStrategy):
    """A learner with one XLA device."""

    def _bind(self) -> None:
        assert self.parallel_devices
        check_environment(needs_platform=False)
        precision = xla_precision(self._precision_plugin)
        from lightning_diloco.devices.xla import ops as xla

        xla.keep_compilations()
        SingleDeviceXLAStrategy.__init__(
            self, self.parallel_devices[0], self._accelerator, self._checkpoint_io, precision
        )
        xla.use_device(self.root_device.index)


class SpmdXLADiLoCo(SingleDeviceXLADiLoCo):
    """A learner with all XLA devices of one host, as one program: parameters and batches are sharded over them.

    If the mesh has several hosts, the class is `SpmdXLAHostsDiLoCo`.

    Attributes:
        sharding_rules: (regular expression, dimension) pairs. The first pair whose expression is found in a parameter's
            name decides. A parameter without such a pair is sharded along its largest dimension that is a multiple of
            the number of devices. Dimension 0 is the last choice: parameters are exchanged in slices of rows, and with
            any other dimension each device has a part of every slice. If no dimension is such a multiple, the
            parameter is replicated.
    """

    # With dimension 1, every device has a part of each token's row.
    sharding_rules: tuple[tuple[str, int], ...] = ((r"(embed_tokens|wte|embedding|lm_head)\b.*weight$", 1),)

    def _bind(self) -> None:
        check_environment(needs_platform=False)
        from lightning_diloco.devices.xla import ops as xla

        self._num_devices = xla.use_mesh()
        super()._bind()
        self.global_rank, self.world_size = xla.host()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        from lightning_diloco.devices.xla import ops as xla

        model = super()._setup_model(model)
        for name, param in model.named_parameters():
            xla.shard(param, self._dim(name, tuple(param.shape)))
        xla.sync()
        return model

    def _dim(self, name: str, shape: tuple[int, ...]) -> int | None:
        """Return the dimension along which a parameter is sharded; None if it is replicated.

        Raises:
            ConfigError: a rule names a dimension that does not exist, or is no multiple of the number of devices.
        """
        count = self._num_devices
        for pattern, dim in self.sharding_rules:
            if re.search(pattern, name):
                if dim < len(shape) and shape[dim] % count == 0:
                    return dim
                raise ConfigError(
                    f"{name} of shape {shape} is to be laid out along dimension {dim} by the rule {pattern!r}: that "
                    f"dimension must exist and be a multiple of the {count} devices; change sharding_rules"
                )
        divided = [(dim > 0, size, -dim) for dim, size in enumerate(shape) if size % count == 0]
        return -max(divided)[2] if divided else None

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Shard a batch over the devices by samples; the last parts are padded if the samples do not divide evenly."""
        from lightning_diloco.devices.xla import ops as xla

        batch = super().batch_to_device(batch, device, dataloader_idx)
        for tensor in tree_leaves(batch):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.device.type == "xla":
                xla.shard(tensor, 0)
        return batch

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state on the host.

        Checkpoints must not gather shards on a device, because each gather would be a new graph.
        """
        return self._fetched(super().optimizer_state(optimizer))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state on the host, see `optimizer_state`."""
        return self._fetched(super().lightning_module_state_dict())

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states; shard tensors of a parameter's shape like the parameter."""
        from lightning_diloco.devices.xla import ops as xla

        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            for param, state in optimizer.state.items():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.shape == param.shape and value.device.type == "xla":
                        xla.shard(value, xla.sharded_dim(param))

    def _fetched(self, state: dict[str, Any]) -> dict[str, Any]:
        def fetched(leaf: Any) -> Any:
            is_there = isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"
            return self._fetch(leaf.detach()) if is_there else leaf

        return tree_map(fetched, state)  # type: ignore[no-any-return]

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        from lightning_diloco.devices.xla import ops as xla

        return xla.fetch(tensor)[0]
