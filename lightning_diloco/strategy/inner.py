"""The option `inner=`: one of Lightning's strategies, which trains inside a learner.

1. The object only describes: its options are copied, and none of its methods run. So it must not set what only the
   Trainer decides.
2. Its class determines the final class at once, because Lightning chooses the precision by it.
3. The final class checks whether it fits the Trainer's devices (`_check_devices`).
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

from lightning_diloco.strategy import backends

# Modules of backends/, imported when needed, and their classes.
_FINAL_CLASSES: dict[type[Strategy], tuple[str, str]] = {
    DDPStrategy: ("ddp", "DDPDiLoCo"),
    FSDPStrategy: ("fsdp", "FSDPDiLoCo"),
    ModelParallelStrategy: ("model_parallel", "ModelParallelDiLoCo"),
}

_LEFT_TO_THE_TRAINER = {
    "_accelerator": "accelerator",
    "_parallel_devices": "devices",
    "cluster_environment": "plugins",
    "_checkpoint_io": "plugins",
    "_precision_plugin": "precision",
}


def problems(inner: object) -> list[str]:
    """Return the problems of an inner strategy, one sentence each."""
    if inner == "auto":
        return []
    if not isinstance(inner, Strategy):
        return [f"inner={inner!r}: must be 'auto' or a strategy object; pass e.g. inner=DDPStrategy()"]
    name = type(inner).__name__
    if type(inner) not in _FINAL_CLASSES:
        allowed = ", ".join(f"{allowed.__name__}()" for allowed in _FINAL_CLASSES)
        return [f"inner={name}(): must be 'auto' or one of {allowed}; use one of them{_instead_of(name)}"]
    found = [
        f"inner={name}({argument}=...): must be left to the Trainer, which decides it; pass Trainer({argument}=...)"
        for attribute, argument in _LEFT_TO_THE_TRAINER.items()
        if getattr(inner, attribute, None) is not None
    ]
    if isinstance(inner, FSDPStrategy):
        from lightning_diloco.strategy.backends import fsdp

        found += fsdp.problems(inner)
    return found


def _instead_of(name: str) -> str:
    reasons = {
        "DeepSpeedStrategy": ": DeepSpeed's engine hides the parameters that learners exchange; ModelParallelStrategy "
        "shards them as ZeRO 3 does",
    }
    return reasons.get(name, "")


def final_class(inner: Strategy) -> type[Any]:
    """Return the final class of a learner with this inner strategy."""
    return backends.load(*_FINAL_CLASSES[type(inner)])
