"""`inner=`: what trains inside a learner, given as one of Lightning's strategies.

1. The object is a description: its options are taken over, and nothing of it runs. So it must not have been given what
   only the Trainer decides.
2. Its class decides the final one, at once: Lightning chooses the precision by it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

from lightning_diloco.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from lightning_diloco.strategy.decoupled import DecoupledDiLoCoStrategy

# Modules and classes; the modules import this one.
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
    """What speaks against this inner strategy, one sentence each."""
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


def become(strategy: DecoupledDiLoCoStrategy, inner: Strategy) -> None:
    """Take the final class for this inner strategy, and its options."""
    module, name = _FINAL_CLASSES[type(inner)]
    strategy.__class__ = getattr(import_module(f"{__package__}.{module}"), name)
    vars(strategy).update(vars(inner))


def check_devices(inner: DecoupledDiLoCoStrategy, devices: list[torch.device], num_nodes: int) -> None:
    """Compare an inner strategy with what the Trainer decided.

    Raises:
        ConfigError: they do not fit.
    """
    types = sorted({device.type for device in devices})
    name = next(allowed.__name__ for allowed in _FINAL_CLASSES if isinstance(inner, allowed))
    backend = getattr(inner, "_process_group_backend", None)
    if types not in (["cpu"], ["cuda"]):
        raise ConfigError(
            f"inner={name}() on devices of type {'/'.join(types)}: it trains on cpu or "
            'cuda; pass Trainer(accelerator="gpu") where there is a CUDA GPU, else pass Trainer(accelerator="cpu")'
        )
    if backend == "nccl" and types == ["cpu"]:
        raise ConfigError(
            "inner with process_group_backend='nccl' on devices of type cpu: nccl needs cuda; leave it out, or pass "
            "process_group_backend='gloo'"
        )
    if isinstance(inner, FSDPStrategy) and len(devices) * num_nodes == 1:
        raise ConfigError(
            f"inner={name}() with 1 device: it shares a model among several; pass Trainer(devices=2), or no inner"
        )
    if isinstance(inner, (FSDPStrategy, ModelParallelStrategy)) and inner._learner.align != "carry":
        raise ConfigError(
            f"align={inner._learner.align!r} with inner={name}(): must be 'carry', which needs no residual that "
            "would have to be sharded, too; leave align out, or use inner=DDPStrategy()"
        )
    if isinstance(inner, ModelParallelStrategy):
        from lightning_diloco.strategy.backends.model_parallel import check_mesh

        check_mesh(inner, len(devices), num_nodes)
