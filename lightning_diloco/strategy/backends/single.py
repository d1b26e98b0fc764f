"""A learner with one device."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_diloco.strategy.hooks import DiLoCoHooks


class SingleDeviceDiLoCo(DiLoCoHooks, SingleDeviceStrategy):
    """A learner with one device: the CPU, or an accelerator that torch has a module for."""

    def _bind(self) -> None:
        assert self.parallel_devices
        device, precision = self.parallel_devices[0], self._precision_plugin
        if isinstance(precision, MixedPrecision) and precision.device == "cuda" != device.type:
            # Lightning takes each accelerator that it does not know for CUDA; nothing would be computed in 16 bits.
            precision = MixedPrecision(precision.precision, device.type)
        SingleDeviceStrategy.__init__(self, device, self._accelerator, self._checkpoint_io, precision)
