"""Parameters that are frozen when the run is joined and may be trained later in the fit, and the opposite case.

The plan of a run is fixed when it begins, so it contains them from the start. While they are frozen, they contribute
zeros. They need anchors and bytes on the wire like any other parameter.

1. With a finetuning callback (`BaseFinetuning`), these are all frozen parameters of the module.
2. Otherwise, these are the frozen parameters that an optimizer holds, except in a module with PEFT adapters.
3. If any other parameter is unfrozen, or an optimizer holds one that neither the module nor an optimizer had at the
   join, training stops with an error, because each learner would train its own.
4. If a parameter that is exchanged is frozen during the fit, a warning says that it still moves. It is frozen if it is
   so before a batch, in the batch's steps and after it: GANs freeze a network only for the other one's step.
5. A parameter with `requires_grad` that no optimizer holds is exchanged, because an optimizer may be given it later.
   A warning names it, because the exchange moves it: it may be a teacher that this learner's code updates.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.trainer.parameters import is_empty, named_parameters

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)


def may_be_unfrozen(trainer: pl.Trainer) -> frozenset[str]:
    """Return the names of frozen parameters that are exchanged.

    Args:
        trainer: a Trainer that is about to fit and has optimizers.
    """
    module = trainer.lightning_module
    frozen = {
        name: p for name, p in named_parameters(module).items() if not p.requires_grad and p.dtype.is_floating_point
    }
    if any(isinstance(callback, BaseFinetuning) for callback in getattr(trainer, "callbacks", ())):
        return frozenset(frozen)
    if not frozen or _has_adapter(module):
        return frozenset()
    held = held_by(trainer)
    found = frozenset(name for name, p in frozen.items() if id(p) in held)
    if found:
        log.warning(
            "%d frozen parameters (%d values) are exchanged, because an optimizer holds them and may train them later; "
            "if they stay frozen, give the optimizer only the parameters with requires_grad",
            len(found),
            sum(frozen[name].numel() for name in found),
        )
    return found


def warn_of_untrained(trainer: pl.Trainer, exchanged: Mapping[str, nn.Parameter]) -> None:
    """Warn of exchanged parameters that no optimizer holds.

    Args:
        trainer: a Trainer that is about to fit and has optimizers.
        exchanged: exchanged parameters by name.
    """
    if not trainer.lightning_module.automatic_optimization:
        return  # the module may step optimizers that the Trainer does not know
    held = held_by(trainer)
    names = [name for name, p in exchanged.items() if p.requires_grad and id(p) not in held]
    if 0 < len(names) < len(exchanged):  # else the optimizers hold copies
        log.warning(
            "%s: exchanged, although no optimizer holds them, because they have requires_grad. If your code updates "
            "them, as with a teacher or torch's AveragedModel, call requires_grad_(False) on them before `fit`: they "
            "then stay local",
            _listed(names),
        )


def check_frozen(trainer: pl.Trainer, frozen: Mapping[str, nn.Parameter]) -> None:
    """Check that no parameter is trained without being exchanged.

    Args:
        trainer: a Trainer that has just made an inner step.
        frozen: parameters that are not exchanged, by name; they were frozen at the join, or are empty.

    Raises:
        ConfigError: there are some; the message names them.
    """
    thawed = {name: p for name, p in frozen.items() if p.requires_grad and not is_empty(p)}
    if not thawed:
        return
    held = held_by(trainer)
    names = [name for name, p in thawed.items() if p.grad is not None or id(p) in held]
    if names:
        raise ConfigError(
            f"{_listed(names)}: unfrozen during the fit, but not exchanged: each learner would train its "
            "own. What is exchanged is fixed when the fit begins: unfreeze with a callback derived from "
            "BaseFinetuning (such as BackboneFinetuning), or give the parameters to the optimizer from the start"
        )


class FrozenLater:
    """Warns once if parameters are frozen during the fit (rule 4).

    Args:
        params: exchanged parameters at the join, by name.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self._trained = {name: p for name, p in params.items() if p.requires_grad}
        self._frozen: dict[str, nn.Parameter] = {}  # since the start of a batch
        self._has_stepped = True

    def batch_begins(self) -> None:
        """Warn about what was frozen in the whole of the last batch that stepped."""
        if not self._has_stepped:
            return
        if names := _still_frozen(self._frozen):
            log.warning(
                "%s: frozen during the fit, but still exchanged. They move with the anchor, which has momentum and the "
                "contributions of learners that have not frozen them. To keep a layer as it is, freeze it before `fit`",
                _listed(list(names)),
            )
            self._trained = {}  # warned once
        self._frozen, self._has_stepped = _still_frozen(self._trained), False

    def step_begins(self) -> None:
        """Record which parameters are frozen in an optimizer's step."""
        self._frozen, self._has_stepped = _still_frozen(self._frozen), True


def check_held(trainer: pl.Trainer, known: Collection[int]) -> None:
    """Check that optimizers hold no new parameters; this takes 0.02 ms for 300 parameters.

    Args:
        trainer: a Trainer that has just made an inner step.
        known: ids of all parameters that the module or an optimizer had at the join.

    Raises:
        ConfigError: there are new ones; the message names them.
    """
    if unknown := held_by(trainer).difference(known):
        module = trainer.lightning_module
        names = [name for name, p in named_parameters(module).items() if id(p) in unknown] or ["of no module"]
        raise ConfigError(
            f"{len(unknown)} parameters ({_listed(names)}): an optimizer trains them, but they are not exchanged, "
            "because the module did not have them when the fit began. Add or replace layers before `fit`"
        )


def _still_frozen(params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: p for name, p in params.items() if not p.requires_grad}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def held_by(trainer: pl.Trainer) -> set[int]:
    """Return the ids of all parameters that the Trainer's optimizers hold."""
    groups = [group["params"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return set(map(id, chain.from_iterable(groups)))


def _has_adapter(module: nn.Module) -> bool:
    """Return whether the module has PEFT layers; PEFT need not be installed."""
    return any(type(child).__module__.partition(".")[0] == "peft" for child in module.modules())
