"""Optimizers that keep copies of parameters: schedule-free ones, Lookahead, float32 masters of bf16 parameters.

What such an optimizer computes next begins with its copy. If only the parameter moved when an anchor lands, the next
step would move it back. So copies take the same movement (`DenseFragments.copies_of`).

1. A copy is a tensor of an optimizer's state, of its parameter's shape, that points where the parameter does: moments
   and sums of squares do not. All parameters of an optimizer are looked at together, a sample of each, and a kind of
   state is judged by its key in the first steps it is there. A parameter that is zero says nothing.
2. In a learner's own checkpoints a copy is what it is beside its parameter, for which the run has another value later.

Source: our choice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_diloco.errors import ConfigError

log = logging.getLogger(__name__)

State = dict[str, Any]

NUM_LOOKS = 4
NUM_SAMPLED = 512
MIN_COSINE, MAX_RATIO = 0.8, 2.0
RELATIVE = "relative"


class ParameterCopies:
    """The copies that the optimizers of one fit keep.

    Args:
        params: by name, as the plan has them.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params
        self._optimizers: list[Optimizer] = []
        self._looks: dict[tuple[int, str], int] = {}  # how often a key of an optimizer was judged
        self._keys: dict[int, set[str]] = {}  # which are copies
        self._device: object = None

    def attach(self, device: object) -> None:
        """This device moves parameters; it asks for copies whenever it does."""
        self._device = device
        if hasattr(device, "copies_of"):
            device.copies_of = self.of

    def of(self, name: str) -> list[Tensor]:
        """The copies of a parameter, as they are now."""
        if not any(self._keys.values()):
            return []
        param = self._params[name]
        states = ((optimizer.state.get(param, {}), self._keys[id(optimizer)]) for optimizer in self._optimizers)
        found = [
            _local(state[key]) for state, keys in states for key in sorted(keys) if isinstance(state.get(key), Tensor)
        ]
        own = _local(param).data_ptr()  # what is the parameter itself moves with it
        return list({copy.data_ptr(): copy for copy in found if copy.data_ptr() != own}.values())

    def look(self, optimizers: Iterable[Optimizer]) -> None:
        """See what these keep; once it is known, that takes next to nothing.

        Raises:
            ConfigError: copies, and the device cannot move them.
        """
        for optimizer in _with_wrapped(optimizers):
            if id(optimizer) not in self._keys:
                self._optimizers.append(optimizer)
                self._keys[id(optimizer)] = set()
            for key in sorted(_keys(optimizer)):  # in the same order on all hosts, whose graphs must be alike
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
        """An optimizer's state with copies as what they are beside their parameters (rule 2).

        Args:
            optimizer: whose state it is.
            state: of it, as `state_dict` has it.
        """
        if not (keys := self._keys.get(id(optimizer))):
            return state
        params, values = _params(optimizer), {index: dict(each) for index, each in state["state"].items()}
        found = [(i, key) for i in values for key in sorted(keys) if isinstance(values[i].get(key), Tensor)]
        for index, key in found:
            values[index][key] = values[index][key].detach() - _local(params[index])
        return {**state, "state": values, RELATIVE: [list(each) for each in found]}

    @staticmethod
    def restore(optimizer: Optimizer, state: State) -> None:
        """The inverse, for what was loaded as it was stored."""
        params = _params(optimizer)
        with torch.no_grad():
            for index, key in state.get(RELATIVE, ()):
                _local(optimizer.state[params[index]][key]).add_(_local(params[index]))


def _points_along(optimizer: Optimizer, key: str) -> bool | None:
    """Whether these tensors are copies of parameters (rule 1); None: nothing can be said yet."""
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
    for param in _params(optimizer):
        kept = optimizer.state.get(param, {}).get(key)
        if isinstance(kept, Tensor) and kept.is_floating_point() and kept.shape == param.shape:
            flat = [_local(each).detach().reshape(-1) for each in (param, kept)]
            step = max(1, flat[0].numel() // NUM_SAMPLED)
            param_part, kept_part = (each[::step].float() for each in flat)
            yield param_part, kept_part


def _keys(optimizer: Optimizer) -> set[str]:
    """Of the first parameter with a state in each group: those of one group are treated alike."""
    found = set[str]()
    for group in optimizer.param_groups:
        state = next((optimizer.state[p] for p in group["params"] if optimizer.state.get(p)), {})
        found |= {key for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
    return found


def _with_wrapped(optimizers: Iterable[Optimizer]) -> Iterator[Optimizer]:
    """These, and those that they step themselves."""
    for optimizer in optimizers:
        yield optimizer
        yield from (each for each in vars(optimizer).values() if isinstance(each, Optimizer))


def _params(optimizer: Optimizer) -> list[Tensor]:
    """In the order of their numbers in a state."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
