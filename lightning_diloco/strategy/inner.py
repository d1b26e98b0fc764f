"""`inner=`: what trains inside a learner, given as one of Lightning's strategies.

1. The object is a description: its options are taken over, and nothing of it runs. So it must not have been given what
   only the Trainer decides.
2. Its class decides the final one, at once: Lightning chooses the precision by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_diloco.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from lightning_diloco.strategy.decoupled import DecoupledDiLoCoStrategy

_LEFT_TO_THE_TRAINER = {
    "_accelerator": "accelerator",
    "_parallel_devices": "devices",
    "cluster_environment": "plugins",
    "_checkpoint_io": "plugins",
    "_precision_plugin": "precision",
}


def problems(inner: object) -> list[str]:
    """What speaks against this inner strategy, one sentence each."""
    if inner == "auto":
        return []
    if not isinstance(inner, Strategy):
        return [f"inner={inner!r}: must be 'auto' or a strategy object; pass e.g. inner=DDPStrategy()"]
    name = type(inner).__name__
    if type(inner) is not DDPStrategy:
        return [
            f"inner={name}(): only 'auto' and DDPStrategy() are supported; use inner=DDPStrategy(...), or one process "
            f"per device, each a learner of its own{_instead_of(name)}"
        ]
    return [
        f"inner={name}({argument}=...): must be left to the Trainer, which decides it; pass Trainer({argument}=...)"
        for attribute, argument in _LEFT_TO_THE_TRAINER.items()
        if getattr(inner, attribute, None) is not None
    ]


def _instead_of(name: str) -> str:
    return ": DeepSpeed's engine hides the parameters that learners exchange" if name == "DeepSpeedStrategy" else ""


def become(strategy: DecoupledDiLoCoStrategy, inner: Strategy) -> None:
    """Take the final class for this inner strategy, and its options."""
    from lightning_diloco.strategy.ddp import DDPDiLoCo

    strategy.__class__ = DDPDiLoCo
    vars(strategy).update(vars(inner))


def check_devices(inner: Strategy, devices: list[torch.device]) -> None:
    """Compare an inner strategy with what the Trainer decided.

    Raises:
        ConfigError: they do not fit.
    """
    types = sorted({device.type for device in devices})
    backend = getattr(inner, "_process_group_backend", None)
    if types not in (["cpu"], ["cuda"]):
        raise ConfigError(
            f"inner={type(inner).__mro__[2].__name__}() on devices of type {'/'.join(types)}: it trains on cpu or "
            "cuda; pass Trainer(accelerator='gpu'), or leave inner out"
        )
    if backend == "nccl" and types == ["cpu"]:
        raise ConfigError(
            "inner with process_group_backend='nccl' on devices of type cpu: nccl needs cuda; leave it out, or pass "
            "process_group_backend='gloo'"
        )
