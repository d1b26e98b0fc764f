"""A learner with one device."""

from __future__ import annotations

from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_diloco.strategy.hooks import DiLoCoHooks


class SingleDeviceDiLoCo(DiLoCoHooks, SingleDeviceStrategy):
    """A learner with one device: the CPU, or an accelerator that torch has a module for."""

    def _bind(self) -> None:
        assert self.parallel_devices
        SingleDeviceStrategy.__init__(
            self, self.parallel_devices[0], self._accelerator, self._checkpoint_io, self._precision_plugin
        )
