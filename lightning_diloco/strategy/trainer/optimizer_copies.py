"""Optimizers that keep copies of parameters: schedule-free ones, Lookahead, float32 masters of bf16 parameters.

Such an optimizer computes its next step from its copy. If only the parameter moved when an anchor lands, the next step
would move it back. So the copies move in the same way (`DenseFragments.copies_of`).

1. A copy is a tensor of an optimizer's state that has its parameter's shape and points in the parameter's direction;
   moments and sums of squares do not. A sample of every parameter of an optimizer is compared, and the tensors under
   one key are judged together, in the first steps in which they exist. Parameters that are zero are not judged.
2. A learner's own checkpoints hold the difference between a copy and its parameter, because the parameter will have
   another value when the checkpoint is loaded.

Source: our choice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.trainer.parameters import local, optimizer_parameters

log = logging.getLogger(__name__)

State = dict[str, Any]

NUM_LOOKS = 4
NUM_SAMPLED = 512
MIN_COSINE, MAX_RATIO = 0.8, 2.0
RELATIVE = "relative"


class ParameterCopies:
    """The copies of parameters in the optimizers of one fit.

    Args:
        params: parameters by name, as in the plan.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params
        self._optimizers: list[Optimizer] = []
        self._looks: dict[tuple[int, str], int] = {}  # how often a key of an optimizer was judged
        self._keys: dict[int, set[str]] = {}  # keys of copies, by optimizer
        self._device: object = None

    def attach(self, device: object) -> None:
        """Give the copies to the device, which moves them with the parameters."""
        self._device = device
        if hasattr(device, "copies_of"):
            device.copies_of = self.of

    def of(self, name: str) -> list[Tensor]:
        """Return the present copies of a parameter."""
        if not any(self._keys.values()):
            return []
        param = self._params[name]
        states = ((optimizer.state.get(param, {}), self._keys[id(optimizer)]) for optimizer in self._optimizers)
        found = [
            local(state[key]) for state, keys in states for key in sorted(keys) if isinstance(state.get(key), Tensor)
        ]
        own = local(param).data_ptr()  # the parameter itself is no copy
        return list({copy.data_ptr(): copy for copy in found if copy.data_ptr() != own}.values())

    def look(self, optimizers: Iterable[Optimizer]) -> None:
        """Find the copies in the states of these optimizers; this is very cheap once they are known.

        Raises:
            ConfigError: there are copies, and the device cannot move them.
        """
        for optimizer in _with_wrapped(optimizers):
            if id(optimizer) not in self._keys:
                self._optimizers.append(optimizer)
                self._keys[id(optimizer)] = set()
            for key in sorted(_keys(optimizer)):  # in the same order on all hosts, whose graphs must be equal
                if self._looks.get((id(optimizer), key), 0) < NUM_LOOKS:
                    self._judge(optimizer, key)

    def _judge(self, optimizer: Optimizer, key: str) -> None:
        verdict = _points_along(optimizer, key)
        if verdict is None:
            return
        looks, keys = self._looks.get((id(optimizer), key), 0), self._keys[id(optimizer)]
        self._looks[id(optimizer), key] = looks + 1 if verdict else NUM_LOOKS
        if not verdict:
            keys.discard(key)
        elif key not in keys:
            name = type(optimizer).__name__
            if self._device is not None and not hasattr(self._device, "copies_of"):
                raise ConfigError(
                    f"{name} keeps copies of parameters in its state ({key!r}): it would move them back when an "
                    "anchor lands; use an optimizer without copies, or train on CPU or CUDA"
                )
            keys.add(key)
            log.info("%s keeps copies of parameters in its state (%r); they land with the parameters", name, key)

    def relative(self, optimizer: Optimizer, state: State) -> State:
        """Return an optimizer's state with differences in place of copies (rule 2).

        Args:
            optimizer: the optimizer.
            state: its state, as `state_dict` returns it.
        """
        if not (keys := self._keys.get(id(optimizer))):
            return state
        params, values = optimizer_parameters(optimizer), {index: dict(each) for index, each in state["state"].items()}
        found = [(i, key) for i in values for key in sorted(keys) if isinstance(values[i].get(key), Tensor)]
        for index, key in found:
            values[index][key] = values[index][key].detach() - local(params[index])
        return {**state, "state": values, RELATIVE: [list(each) for each in found]}

    @staticmethod
    def restore(optimizer: Optimizer, state: State) -> None:
        """Turn the differences in a loaded state into copies again."""
        params = optimizer_parameters(optimizer)
        with torch.no_grad():
            for index, key in state.get(RELATIVE, ()):
                local(optimizer.state[params[index]][key]).add_(local(params[index]))


def _points_along(optimizer: Optimizer, key: str) -> bool | None:
    """Return whether these tensors are copies of parameters (rule 1); None if that is not known yet."""
    sums = [
        torch.stack((kept.dot(param), kept.dot(kept), param.dot(param)))
        for param, kept in _sampled(optimizer, key)
        if kept.numel()
    ]
    if not sums:
        return None
    product, kept_sq, param_sq = torch.stack(sums).sum(0).tolist()
    if not kept_sq * param_sq > 0:
        return None
    cosine, ratio = product / math.sqrt(kept_sq * param_sq), math.sqrt(kept_sq / param_sq)
    return cosine > MIN_COSINE and 1 / MAX_RATIO < ratio < MAX_RATIO


def _sampled(optimizer: Optimizer, key: str) -> Iterator[tuple[Tensor, Tensor]]:
    for param in optimizer_parameters(optimizer):
        kept = optimizer.state.get(param, {}).get(key)
        if isinstance(kept, Tensor) and kept.is_floating_point() and kept.shape == param.shape:
            flat = [local(each).detach().reshape(-1) for each in (param, kept)]
            step = max(1, flat[0].numel() // NUM_SAMPLED)
            param_part, kept_part = (each[::step].float() for each in flat)
            yield param_part, kept_part


def _keys(optimizer: Optimizer) -> set[str]:
    """Return the keys in the state of one parameter per group; those of one group have the same keys."""
    found = set[str]()
    for group in optimizer.param_groups:
        state = next((optimizer.state[p] for p in group["params"] if optimizer.state.get(p)), {})
        found |= {key for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
    return found


def _with_wrapped(optimizers: Iterable[Optimizer]) -> Iterator[Optimizer]:
    """Yield these optimizers and those that they wrap."""
    for optimizer in optimizers:
        yield optimizer
        yield from (each for each in vars(optimizer).values() if isinstance(each, Optimizer))
