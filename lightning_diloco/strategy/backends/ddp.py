"""A learner with several devices, each of which holds the whole model (DistributedDataParallel)."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy

from lightning_diloco.strategy.backends.ranks import RanksHooks


class DDPDiLoCo(RanksHooks, DDPStrategy):
    """A learner with several CPU or CUDA devices."""

    _inner = DDPStrategy

    def _bind(self) -> None:
        devices, num_nodes = (
            self.__dict__.pop("parallel_devices"),
            self.__dict__.pop("num_nodes"),
        )  # the final class has properties of these names
        DDPStrategy.__init__(
            self,
            accelerator=self._accelerator,
            parallel_devices=devices,
            cluster_environment=self.cluster_environment,
            checkpoint_io=self._checkpoint_io,
            precision_plugin=self._precision_plugin,
        )
        self.num_nodes = num_nodes
        self.set_world_ranks()
