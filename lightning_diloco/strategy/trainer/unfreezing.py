"""Parameters that are frozen when a run is joined, and may be trained later in the fit.

The plan of a run is fixed when it begins, so it must hold them from the start. While they are frozen they contribute
zeros, and land as they are; they take the anchors, and the bytes on the wire, of any other parameter.

1. With a finetuning callback (`BaseFinetuning`) it is all of the module's.
2. Else it is what an optimizer holds: whoever unfreezes by hand gives the optimizer all of it from the start. What
   nobody will train is not given to one, or lies under an adapter of PEFT.
3. Whatever is unfrozen beyond that stops training: each learner would train its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.trainer.parameters import named_parameters

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)


def may_be_unfrozen(trainer: pl.Trainer) -> frozenset[str]:
    """Names of frozen parameters that are exchanged like those that are trained.

    Args:
        trainer: about to fit; its optimizers exist.
    """
    module = trainer.lightning_module
    frozen = {
        name: p for name, p in named_parameters(module).items() if not p.requires_grad and p.dtype.is_floating_point
    }
    if any(isinstance(callback, BaseFinetuning) for callback in getattr(trainer, "callbacks", ())):
        return frozenset(frozen)
    if not frozen or _has_adapter(module):
        return frozenset()
    held = _held_by(trainer)
    found = frozenset(name for name, p in frozen.items() if id(p) in held)
    if found:
        log.warning(
            "%d frozen parameters (%d values) are exchanged, as an optimizer holds them and may train them later; if "
            "nobody unfreezes them, give the optimizer only those with requires_grad",
            len(found),
            sum(frozen[name].numel() for name in found),
        )
    return found


def check_frozen(trainer: pl.Trainer, frozen: Mapping[str, nn.Parameter]) -> None:
    """Look for parameters that are trained, and not exchanged.

    Args:
        trainer: that just made an inner step.
        frozen: what was frozen when the run was joined, and is not exchanged.

    Raises:
        ConfigError: there are some; they are named.
    """
    thawed = {name: p for name, p in frozen.items() if p.requires_grad}
    if not thawed:
        return
    held = _held_by(trainer)
    names = [name for name, p in thawed.items() if p.grad is not None or id(p) in held]
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise ConfigError(
            f"{', '.join(names[:4])}{more}: unfrozen during the fit, but not exchanged: each learner would train its "
            "own. What is exchanged is fixed when the fit begins: unfreeze with a callback derived from "
            "BaseFinetuning (such as BackboneFinetuning), or give the parameters to the optimizer from the start"
        )


def _held_by(trainer: pl.Trainer) -> set[int]:
    return {id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}


def _has_adapter(module: nn.Module) -> bool:
    """Whether PEFT's layers are in it; it need not be installed."""
    return any(type(child).__module__.partition(".")[0] == "peft" for child in module.modules())
