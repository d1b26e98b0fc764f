"""The state of the module that is not exchanged: each learner has its own.

1. It consists of persistent buffers (statistics of BatchNorm, queues, codebooks), and of frozen parameters that
   training changes (teachers that follow a student). Changes are found in a sample of each parameter, because a
   pretrained base is large.
2. It is part of a learner's own checkpoints and is restored with them. A newcomer takes over the state of a peer.
3. A frozen parameter that training changes usually begins as a copy of a trained one. When a learner adopts a run's
   values, its copy is made again from the adopted values (`follow`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_diloco.strategy.trainer.parameters import local, named_parameters, plain_name

NUM_SAMPLED = 4096


class OwnState:
    """The own state of one learner in one fit.

    Args:
        module: module of the learner.
        frozen: parameters that are not exchanged, by name, as they are before the first step.
    """

    def __init__(self, module: nn.Module, frozen: Mapping[str, Tensor]) -> None:
        self._module = module
        self._frozen = frozen
        self._begun = {name: _sample(p).clone() for name, p in frozen.items()}

    def take(self) -> dict[str, Tensor]:
        """Return the live tensors by name."""
        return dict(_persistent_buffers(self._module)) | {name: local(self._frozen[name]) for name in self._changed()}

    def objection(self, state: Mapping[str, Tensor]) -> str | None:
        """Return why a state does not fit this module; None if it does."""
        here = self._all()
        for name, value in state.items():
            if name not in here or here[name].shape != value.shape:
                found = f"shape {tuple(here[name].shape)}" if name in here else "no such value"
                return f"it has {name} of shape {tuple(value.shape)}, this learner has {found}"
        return None

    def give(self, state: Mapping[str, Tensor]) -> None:
        """Load a state to which there is no objection."""
        here = self._all()
        with torch.no_grad():
            for name, value in state.items():
                here[name].copy_(value)

    def _all(self) -> dict[str, Tensor]:
        return dict(_persistent_buffers(self._module)) | {name: local(p) for name, p in self._frozen.items()}

    def _changed(self) -> list[str]:
        names = [name for name in self._begun if self._begun[name].numel()]
        differ = [(_sample(self._frozen[name]) != self._begun[name]).any() for name in names]
        told = torch.stack(differ).tolist() if differ else []  # the host waits for the device once
        return [name for name, is_changed in zip(names, told, strict=True) if is_changed]


def copies_of_trained(module: nn.Module, trained: Collection[str]) -> dict[str, str]:
    """Map frozen parameters that equal a trained one bit for bit to that one, by name.

    Args:
        module: module with whole parameters.
        trained: names of the exchanged parameters.
    """
    params = named_parameters(module)
    alike = defaultdict[tuple[str, torch.Size], list[str]](list)
    for name in params:
        if name in trained:
            alike[name.rpartition(".")[2], params[name].shape].append(name)
    found = {}
    for name, p in params.items():
        if name not in trained and p.numel() > 1 and not isinstance(p, DTensor):
            others = alike[name.rpartition(".")[2], p.shape]
            twin = next((other for other in others if torch.equal(params[other], p)), None)
            if twin is not None:
                found[name] = twin
    return found


def follow(module: nn.Module, copies: Mapping[str, str], names: Collection[str]) -> None:
    """Copy the adopted values into frozen parameters that were copies of trained ones.

    Args:
        module: module that has adopted the values of a run.
        copies: result of `copies_of_trained` before the values were adopted.
        names: names of the copies to be made again.
    """
    params = named_parameters(module)
    with torch.no_grad():
        for name in names:
            if name in copies:
                params[name].copy_(params[copies[name]])


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield plain_name(f"{path}.{name}" if path else name), local(buffer)


def _sample(param: Tensor) -> Tensor:
    flat = local(param).reshape(-1)
    return flat[:: max(1, flat.numel() // NUM_SAMPLED)]
