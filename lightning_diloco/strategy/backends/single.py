"""A learner with one device."""

from __future__ import annotations

from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_diloco.strategy.backends.precision import of_device
from lightning_diloco.strategy.hooks import DiLoCoHooks


class SingleDeviceDiLoCo(DiLoCoHooks, SingleDeviceStrategy):
    """A learner with one device: the CPU, or an accelerator that torch has a module for."""

    def _bind(self) -> None:
        assert self.parallel_devices
        device = self.parallel_devices[0]
        precision = of_device(self._precision_plugin, device.type)
        SingleDeviceStrategy.__init__(self, device, self._accelerator, self._checkpoint_io, precision)
