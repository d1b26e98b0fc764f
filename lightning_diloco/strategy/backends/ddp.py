"""A learner with several devices, each of which holds the whole model (DistributedDataParallel)."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_diloco.strategy.backends.precision import of_device
from lightning_diloco.strategy.backends.ranks import RanksHooks


class DDPDiLoCo(RanksHooks, DDPStrategy):
    """A learner with several devices of one type: CPUs, or accelerators that torch has a module for."""

    _inner = DDPStrategy

    def _bind(self) -> None:
        devices, num_nodes = (
            self.__dict__.pop("parallel_devices"),
            self.__dict__.pop("num_nodes"),
        )  # the final class has properties with these names
        DDPStrategy.__init__(
            self,
            accelerator=self._accelerator,
            parallel_devices=devices,
            cluster_environment=self.cluster_environment,
            checkpoint_io=self._checkpoint_io,
            precision_plugin=of_device(self._precision_plugin, devices[0].type),
        )
        self.num_nodes = num_nodes
        self.set_world_ranks()

    @override
    def determine_ddp_device_ids(self) -> list[int] | None:
        """Return the index of this rank's GPU; None on other devices, for which Lightning would use streams of CUDA."""
        return [self.root_device.index] if self.root_device.type == "cuda" else None
