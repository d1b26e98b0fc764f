"""Mixed precision of the learner's device type."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import MixedPrecision, Precision


def of_device(plugin: Precision | None, kind: str) -> Precision | None:
    """Return the plugin for devices of this type.

    Lightning takes each accelerator that it does not know for CUDA, and nothing would be computed in 16 bits.
    """
    if isinstance(plugin, MixedPrecision) and plugin.device == "cuda" != kind:
        return MixedPrecision(plugin.precision, kind)
    return plugin
