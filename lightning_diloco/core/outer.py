"""The outer step on the syncer, and the publication of its result with the same bits for every party.

    buf    <- decay * buf + g
    master <- master - lr * (g + push * buf)        decay = push = mu is Nesterov as torch.optim.SGD does it
    update <- Q(master - published)                 these bytes go to the learners
    anchor <- anchor + dequantized update           the same addition at the syncer (published) and at every learner

The master keeps the quantization error, which becomes part of the next update and never accumulates.

Shapes: _P flat fragment.
Source: arXiv 2604.21428 (outer optimizer); publishing by quantized difference is our choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_diloco.config import Wire
from lightning_diloco.core.blocks import chunk_numel
from lightning_diloco.core.quantize import Decoder, encode
from lightning_diloco.errors import ConfigError

CHAIN_LENGTH = 3
"""Versions behind up to which a learner gets the updates that it misses; beyond, the published values in full."""


@dataclass(frozen=True, slots=True)
class Momentum:
    """Nesterov coefficients of one outer step.

    Args:
        decay: factor of the momentum buffer before the gradient is added.
        push: fraction of the buffer that moves the anchor.
    """

    decay: float
    push: float


def nesterov_step(
    anchor: Tensor, momentum: Tensor, outer_gradient: Tensor, *, lr: float, momentum_coef: float | Momentum
) -> None:
    """Make one outer step in place; with a plain number it equals torch.optim.SGD(nesterov=True) bit for bit.

    Args:
        anchor: (P,) float32, the master.
        momentum: (P,) float32, zeros before the first step.
        outer_gradient: (P,) float32 or bfloat16, with the sign of a gradient.
        lr: outer learning rate.
        momentum_coef: mu, or the coefficients from `momentum_by_work`.
    """
    coefs = momentum_coef if isinstance(momentum_coef, Momentum) else Momentum(momentum_coef, momentum_coef)
    for part in _chunks(anchor, 1):
        gradient = outer_gradient[part].float()
        buffer = momentum[part].mul_(coefs.decay).add_(gradient)
        anchor[part].add_(gradient.add(buffer, alpha=coefs.push), alpha=-lr)


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
    decoder = Decoder(update, anchor.numel(), wire, block_size)
    for part in _chunks(anchor, block_size):
        target = anchor[part]
        target.add_(decoder.read(part.start, torch.empty_like(target)))


def _chunks(x_P: Tensor, block_size: int) -> Iterator[slice]:
    step = chunk_numel(x_P, block_size)
    for start in range(0, x_P.numel(), step):
        yield slice(start, min(start + step, x_P.numel()))
