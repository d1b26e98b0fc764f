"""Mixed precision of the learner's device type."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import MixedPrecision, Precision


def of_device(plugin: Precision | None, kind: str) -> Precision | None:
    """Return the plugin for devices of this type.

    Lightning treats each unknown accelerator as CUDA, and then nothing would be computed in 16 bits.
    """
    if isinstance(plugin, MixedPrecision) and plugin.device == "cuda" != kind:
        return MixedPrecision(plugin.precision, kind)
    return plugin
