"""The syncer's side of an outer step, and how its result reaches every party as the same bits.

    buf    <- decay * buf + g
    master <- master - lr * (g + push * buf)        decay = push = mu is Nesterov as torch.optim.SGD does it
    update <- Q(master - published)                 these bytes go to the learners
    anchor <- anchor + dequantized update           the same addition at the syncer (published) and at every learner

The master keeps what quantization leaves out, so it goes into the next update and never piles up.

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


@dataclass(frozen=True, slots=True)
class Momentum:
    """Nesterov coefficients of one outer step.

    Args:
        decay: what is left of the momentum buffer, before the gradient is added.
        push: share of the buffer that moves the anchor.
    """

    decay: float
    push: float


def nesterov_step(
    anchor: Tensor, momentum: Tensor, outer_gradient: Tensor, *, lr: float, momentum_coef: float | Momentum
) -> None:
    """One outer step, in place; with a plain number bit for bit torch.optim.SGD(nesterov=True).

    Args:
        anchor: (P,) float32, the master.
        momentum: (P,) float32, zeros before the first step.
        outer_gradient: (P,) float32 or bfloat16; a descent direction has the sign of a gradient.
        lr: outer learning rate.
        momentum_coef: mu, or the coefficients of a round of another length, see `momentum_by_work`.
    """
    coefs = momentum_coef if isinstance(momentum_coef, Momentum) else Momentum(momentum_coef, momentum_coef)
    for part in _chunks(anchor, 1):
        gradient = outer_gradient[part].float()
        buffer = momentum[part].mul_(coefs.decay).add_(gradient)
        anchor[part].add_(gradient.add(buffer, alpha=coefs.push), alpha=-lr)


def momentum_by_work(mu: float, work: float) -> Momentum:
    """Momentum of a round by the work that went into it, with s = min(work, 1):

        decay = mu ** s,  push = mu * (1 - decay) / (1 - mu)

    A full round has decay = push = mu. Cut the same work into other rounds (few contributors, drains, rejoins, learners
    out of phase), and both what the buffer forgets and how far a steady pseudo-gradient moves the anchor stay the same:
    lr / (1 - mu) per unit of work. With push = decay, a round of one step would move the anchor by more than a whole
    buffer.

    Args:
        mu: coefficient of a full round, 0 <= mu < 1.
        work: of the round, > 0; 1 for all learners with H inner steps each (`protocol/shares.py`).

    Raises:
        ConfigError: work is not above 0.

    Source: our choice.
    """
    if not work > 0:
        raise ConfigError(f"work={work}: a round holds more than 0 inner steps; refuse empty contributions")
    decay = float(mu ** min(work, 1.0))
    return Momentum(decay, mu * ((1 - decay) / (1 - mu)))


def publish(master: Tensor, published: Tensor, *, wire: Wire, block_size: int) -> Tensor:
    """Encode what the published values lack of the master, and add just that to them.

    Args:
        master: (P,) float32.
        published: (P,) float32, the anchor as every learner has it; updated in place.
        wire: precision.
        block_size: values that share a scale.

    Returns:
        The update, uint8, for `apply_update`.

    Raises:
        NonFiniteError: master holds NaN or Inf; published is unchanged then.
    """
    update = encode(master - published, wire=wire, block_size=block_size, name="the outer update")
    apply_update(published, update, wire=wire, block_size=block_size)
    return update


def apply_update(anchor: Tensor, update: Tensor, *, wire: Wire, block_size: int) -> None:
    """anchor <- anchor + dequantized update, in place; equal bits in, equal bits out, on every party.

    Args:
        anchor: (P,) float32.
        update: uint8 from `publish`.
        wire: precision of the update.
        block_size: values that share a scale.

    Raises:
        CorruptMessageError: the update is not a valid one; anchor is unchanged then.
    """
    decoder = Decoder(update, anchor.numel(), wire, block_size)
    for part in _chunks(anchor, block_size):
        target = anchor[part]
        target.add_(decoder.read(part.start, torch.empty_like(target)))


def _chunks(x_P: Tensor, block_size: int) -> Iterator[slice]:
    step = chunk_numel(x_P, block_size)
    for start in range(0, x_P.numel(), step):
        yield slice(start, min(start + step, x_P.numel()))
