"""The outer step on the syncer, and the publication of its result with the same bits for every party.

    buf    <- decay * buf + g
    master <- master - lr * (g + push * buf)        decay = push = mu is Nesterov as torch.optim.SGD does it
    update <- Q(master - published)                 these bytes go to the learners
    anchor <- anchor + dequantized update           the same addition at the syncer (published) and at every learner

1. The master keeps the quantization error, which becomes part of the next update and never accumulates.
2. Every product and every sum is rounded to float32. torch.optim.SGD uses fused multiply-adds where the CPU has them,
   so its last bit depends on the machine; here it does not.

Shapes: _P flat fragment.
Source: arXiv 2604.21428 (outer optimizer); publishing by quantized difference is our choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_diloco.config import Wire
from lightning_diloco.core import native
from lightning_diloco.core.blocks import all_finite
from lightning_diloco.core.quantize import Decoder, encode, wire_nbytes
from lightning_diloco.errors import ConfigError, NonFiniteError


@dataclass(frozen=True, slots=True)
class Momentum:
    """Nesterov coefficients of one outer step.

    Args:
        decay: factor of the momentum buffer before the gradient is added.
        push: fraction of the buffer that moves the anchor.
    """

    decay: float
    push: float


@dataclass(frozen=True, slots=True)
class OuterState:
    """State of the outer optimizer for one fragment.

    Args:
        master: (P,) float32, on the host.
        momentum: (P,) float32, zeros before the first step.
        published: (P,) float32, the anchor that every learner has.
    """

    master: Tensor
    momentum: Tensor
    published: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Master, momentum and published values."""
        return self.master, self.momentum, self.published


def outer_step(
    state: OuterState,
    outer_gradient: Tensor,
    *,
    lr: float,
    momentum_coef: Momentum,
    wire: Wire,
    block_size: int,
    in_place: bool = False,
) -> tuple[OuterState, Tensor]:
    """Make one outer step and publish the result.

    Args:
        state: the state before the step; unchanged unless in place.
        outer_gradient: (P,) bfloat16, with the sign of a gradient; P is a multiple of the block size.
        lr: outer learning rate.
        momentum_coef: coefficients from `momentum_by_work`.
        wire: precision of the update.
        block_size: values that share a scale.
        in_place: write the new state over the old one.

    Returns:
        The state after the step, and the update, uint8, for `apply_update`.

    Raises:
        NonFiniteError: the momentum or the update is not finite. In place, the state is then lost.
    """
    after = state if in_place else OuterState(*(native.empty(x.numel(), torch.float32) for x in state.tensors))
    if (kernels := native.kernels_for(outer_gradient, 8 if wire == "int8" else None)) is not None:
        coefs = (momentum_coef.decay, momentum_coef.push, lr)
        return after, _native_step(kernels, state, after, outer_gradient, coefs=coefs, block_size=block_size)
    if not in_place:
        for old, new in zip(state.tensors, after.tensors, strict=True):
            new.copy_(old)
    nesterov_step(after.master, after.momentum, outer_gradient, lr=lr, momentum_coef=momentum_coef)
    if not all_finite(after.momentum):
        raise _not_finite()
    return after, publish(after.master, after.published, wire=wire, block_size=block_size)


def _native_step(
    kernels: Any,
    before: OuterState,
    after: OuterState,
    gradient_P: Tensor,
    *,
    coefs: tuple[float, float, float],
    block_size: int,
) -> Tensor:
    numel = gradient_P.numel()
    update = native.empty(wire_nbytes(numel, "int8", block_size), torch.uint8)
    q, scales = native.array(update[:numel].view(torch.int8)), native.array(update[numel:].view(torch.bfloat16))
    gradient, numbers = native.array(gradient_P), tuple(np.float32(coef) for coef in coefs)
    old, new = ([native.array(x) for x in state.tensors] for state in (before, after))

    def step(start: int, stop: int) -> bool:
        here, b = slice(start, stop), slice(start // block_size, stop // block_size)
        states = (tuple(x[here] for x in tensors) for tensors in (old, new))
        encoded = (q[here], scales[b])
        return bool(kernels.outer_step(gradient[here], *states, encoded, numbers, block_size, native.INT8_LEVELS))

    if not all(native.in_parallel(step, native.ranges(numel, block_size))):
        raise _not_finite()
    return update


def _not_finite() -> NonFiniteError:
    return NonFiniteError(
        "found NaN or Inf in the momentum or the update; only finite values are kept; refuse this round's contributions"
    )


def nesterov_step(
    anchor: Tensor, momentum: Tensor, outer_gradient: Tensor, *, lr: float, momentum_coef: Momentum
) -> None:
    """Make one outer step in place; with decay = push it equals torch.optim.SGD(nesterov=True), up to rule 2.

    Args:
        anchor: (P,) float32, the master.
        momentum: (P,) float32, zeros before the first step.
        outer_gradient: (P,) float32 or bfloat16, with the sign of a gradient.
        lr: outer learning rate.
        momentum_coef: the coefficients from `momentum_by_work`.
    """
    for start, stop in native.ranges(anchor.numel(), 1):
        gradient = outer_gradient[start:stop].float()
        buffer = momentum[start:stop].mul_(momentum_coef.decay).add_(gradient)
        anchor[start:stop].sub_((buffer * momentum_coef.push).add_(gradient).mul_(lr))


def momentum_by_work(mu: float, work: float) -> Momentum:
    """Return the momentum coefficients of a round for the work in it, with s = min(work, 1):

        decay = mu ** s,  push = mu * (1 - decay) / (1 - mu)

    A full round has decay = push = mu. If the same work is divided into other rounds (few contributors, drains,
    rejoins, learners out of phase), the buffer still decays by the same factor, and a steady pseudo-gradient still
    moves the anchor by lr / (1 - mu) per unit of work. With push = decay, a round of one step would move the anchor by
    more than a whole buffer.

    Args:
        mu: coefficient of a full round, 0 <= mu < 1.
        work: work in the round, > 0; it is 1 if all learners contribute H inner steps (`protocol/syncer/shares.py`).

    Raises:
        ConfigError: work is not positive.

    Source: our choice.
    """
    if not work > 0:
        raise ConfigError(f"work={work}: a round must hold more than 0 inner steps; refuse empty contributions")
    decay = float(mu ** min(work, 1.0))
    return Momentum(decay, mu * ((1 - decay) / (1 - mu)))


def publish(master: Tensor, published: Tensor, *, wire: Wire, block_size: int) -> Tensor:
    """Encode master - published and add the decoded result to published.

    Args:
        master: (P,) float32.
        published: (P,) float32, the anchor that every learner has; updated in place.
        wire: wire precision.
        block_size: values that share a scale.

    Returns:
        The update, uint8, for `apply_update`.

    Raises:
        NonFiniteError: master holds NaN or Inf; published is then unchanged.
    """
    update = encode(master - published, wire=wire, block_size=block_size, name="the outer update")
    apply_update(published, update, wire=wire, block_size=block_size)
    return update


def apply_update(anchor: Tensor, update: Tensor, *, wire: Wire, block_size: int) -> None:
    """Compute anchor <- anchor + dequantized update in place; equal inputs give equal bits on every party.

    Args:
        anchor: (P,) float32.
        update: uint8 from `publish`.
        wire: precision of the update.
        block_size: values that share a scale.

    Raises:
        CorruptMessageError: the update is invalid; anchor is then unchanged.
    """
    Decoder(update, anchor.numel(), wire, block_size).add_to(anchor)
