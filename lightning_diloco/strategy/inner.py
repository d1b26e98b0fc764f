"""The option `inner=`: one of Lightning's strategies, which trains inside a learner.

1. The object only holds options: they are copied, and none of its methods run. It must not set options that only the
   Trainer decides.
2. Its class determines the final class at once, because Lightning chooses the precision by it.
3. The final class checks whether it fits the Trainer's devices (`_check_devices`).
"""

from __future__ import annotations

from lightning.pytorch import strategies
from lightning.pytorch.strategies import FSDPStrategy, Strategy

from lightning_diloco.strategy import backends

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
    if type(inner) not in [getattr(strategies, allowed) for allowed in backends.INNER]:
        allowed = ", ".join(f"{allowed}()" for allowed in backends.INNER)
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
