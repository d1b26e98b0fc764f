"""Names, shapes and values of the parameters of a module.

1. Names come from `named_parameters()` of the plain LightningModule, without the prefixes of wrappers. Tied weights
   appear once.
2. Trainable parameters and those that may become trainable (unfreezing.py) are exchanged, unless they are empty. All
   other parameters must be equal on all learners when a script has built them; they are compared by digest. Each
   learner has its own buffers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_diloco.core.fragments import FragmentPlan, scatter
from lightning_diloco.errors import ConfigError
from lightning_diloco.manifest import ModelDescription, TokenUnit

# Prefixes of FSDP and of activation checkpointing.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters by name, tied ones once.

    Raises:
        ConfigError: some are lazy, so that they have no shape yet.
    """
    found = {plain_name(name): p for name, p in module.named_parameters()}
    if lazy := [name for name, p in found.items() if is_lazy(p)]:
        raise ConfigError(
            [f"parameter {n!r} has no shape yet: it must have one; materialize a lazy one first" for n in lazy]
        )
    return found


def trainable_parameters(module: nn.Module, also: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """Return the parameters that learners exchange, by name; empty ones are left out.

    Args:
        module: module of a learner.
        also: names of frozen parameters that are exchanged as well.

    Raises:
        ConfigError: there are no such parameters, or some are lazy or not floating point.
    """
    found = {
        name: p for name, p in named_parameters(module).items() if (p.requires_grad or name in also) and not is_empty(p)
    }
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


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer in the order of their numbers in its state."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as the live tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def is_empty(param: Tensor) -> bool:
    """Return whether a parameter has no elements; under FSDP1, a rank may hold none of a parameter that has some."""
    return param.numel() == 0 and not getattr(param, "_fsdp_flattened", False)


def describe(
    module: nn.Module,
    token_unit: TokenUnit | None,
    *,
    params: dict[str, nn.Parameter] | None = None,
    shape: Callable[[Tensor], tuple[int, ...]] = lambda tensor: tuple(tensor.shape),
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> ModelDescription:
    """Return the description of a model that learners and syncer compare.

    Args:
        module: the LightningModule, in its final precision.
        token_unit: unit that steps count, if it is known before the first batch.
        params: exchanged parameters by name; None: `trainable_parameters`.
        shape: returns the shape of a whole parameter, from this rank's part of it.
        whole: returns a whole frozen parameter, from this rank's part of it; all ranks call it in the same order.
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
    """Return the names of the embeddings among these parameters, and of heads tied to them."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    return frozenset(name for name, p in params.items() if id(p) in tables)


def named_values(
    plan: FragmentPlan, block_size: int, params: dict[str, nn.Parameter], values: Callable[[int], Tensor]
) -> dict[str, Tensor]:
    """Return whole tensors on the host, made from flat fragments.

    Args:
        plan: fragment plan of the run.
        block_size: block size of the run.
        params: every parameter of the plan; their dtypes are used.
        values: returns the values of a fragment, float32 [P], by its number.

    Returns:
        New tensors by name, in the dtype of the parameter.
    """
    tensors = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in params.items()}  # p may be on XLA
    for fragment in range(plan.num_fragments):
        scatter(plan.layout(fragment, block_size), values(fragment), tensors)
    return tensors


def aliases(module: nn.Module) -> dict[str, str]:
    """Map every name of every parameter to its name in `named_parameters()`; tied weights have several names."""
    first = {id(p): plain_name(name) for name, p in module.named_parameters()}
    return {plain_name(name): first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}


def plain_name(name: str) -> str:
    """Return a name without the prefixes of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _digest(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()  # a collective: all ranks call it in the same order
    tensor = tensor.detach().cpu().contiguous()
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
