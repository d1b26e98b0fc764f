"""The model as the run sees it.

1. Names come from `named_parameters()` of the plain LightningModule, without what wrappers of its layers add to them:
   wrappers do not show, tied weights appear once.
2. What is exchanged are trainable parameters, and those that may become trainable (unfreezing.py). What else is frozen
   must be equal everywhere when a script has built it, and is compared by digest. Buffers are a learner's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_diloco.core.fragments import FragmentPlan, scatter
from lightning_diloco.errors import ConfigError
from lightning_diloco.manifest import ModelDescription, TokenUnit

# Of FSDP and of activation checkpointing.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by name, tied ones once."""
    return {plain_name(name): p for name, p in module.named_parameters()}


def trainable_parameters(module: nn.Module, also: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """The parameters that learners exchange, by name.

    Args:
        module: of a learner.
        also: names of frozen ones that are exchanged, too.

    Raises:
        ConfigError: there are none, or some are not floating point; all are named.
    """
    found = {name: p for name, p in named_parameters(module).items() if p.requires_grad or name in also}
    if not found:
        raise ConfigError(
            f"{type(module).__name__} has no trainable parameter: at least one is needed; "
            "set requires_grad=True on what is to be trained, or use another strategy"
        )
    odd = [name for name, p in found.items() if not p.dtype.is_floating_point]
    if odd:
        raise ConfigError(
            [f"parameter {n!r} is {found[n].dtype}: must be a real float type; freeze it or convert it" for n in odd]
        )
    return found


def describe(
    module: nn.Module,
    token_unit: TokenUnit | None,
    *,
    params: dict[str, nn.Parameter] | None = None,
    shape: Callable[[Tensor], tuple[int, ...]] = lambda tensor: tuple(tensor.shape),
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> ModelDescription:
    """What the others need to know of this model.

    Args:
        module: the LightningModule, in its final precision.
        token_unit: what steps count, if that is known before the first batch.
        params: what is exchanged; None: `trainable_parameters`.
        shape: of a parameter, where the tensor is a part of it.
        whole: a frozen parameter, where the tensor is a part of it; called by all ranks in the same order.
    """
    params = trainable_parameters(module) if params is None else params
    frozen = {name: p for name, p in named_parameters(module).items() if name not in params}
    return ModelDescription(
        shapes={name: shape(p) for name, p in params.items()},
        mean_names=embedding_names(module, params),
        frozen_digest={name: _digest(whole(p)) for name, p in frozen.items()},
        token_unit=token_unit,
    )


def embedding_names(module: nn.Module, params: dict[str, nn.Parameter]) -> frozenset[str]:
    """Which of these parameters are embeddings, or heads tied to them, whichever name they go by."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    return frozenset(name for name, p in params.items() if id(p) in tables)


def named_values(
    plan: FragmentPlan, block_size: int, params: dict[str, nn.Parameter], values: Callable[[int], Tensor]
) -> dict[str, Tensor]:
    """Full tensors on the host from flat fragments.

    Args:
        plan: of the run.
        block_size: of the run.
        params: every parameter of the plan; gives dtypes.
        values: float32 [P] of a fragment, by its number.

    Returns:
        New tensors by name, in the dtype of the parameter.
    """
    tensors = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in params.items()}  # empty_like: not from XLA
    for fragment in range(plan.num_fragments):
        scatter(plan.layout(fragment, block_size), values(fragment), tensors)
    return tensors


def aliases(module: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> its name in `named_parameters()`; they differ for tied weights."""
    first = {id(p): plain_name(name) for name, p in module.named_parameters()}
    return {plain_name(name): first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}


def plain_name(name: str) -> str:
    """A name without what wrappers add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _digest(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()  # by all ranks together, one after another
    tensor = tensor.detach().cpu().contiguous()
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
