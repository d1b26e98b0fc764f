"""The syncer's side of an outer step, and how its result reaches every party as the same bits.

    buf    <- mu * buf + g
    master <- master - lr * (g + mu * buf)          Nesterov, as torch.optim.SGD does it
    update <- Q(master - published)                 these bytes go to the learners
    anchor <- anchor + dequantized update           the same addition at the syncer (published) and at every learner

The master keeps what quantization leaves out, so it goes into the next update and never piles up.

Shapes: _P flat fragment.
Source: arXiv 2604.21428 (outer optimizer); publishing by quantized difference is our choice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_diloco.config import Wire
from lightning_diloco.core.blocks import chunk_numel
from lightning_diloco.core.quantize import Decoder, encode
from lightning_diloco.errors import ConfigError


def nesterov_step(anchor: Tensor, momentum: Tensor, outer_gradient: Tensor, *, lr: float, momentum_coef: float) -> None:
    """One outer step, in place; bit for bit torch.optim.SGD(nesterov=True).

    Args:
        anchor: (P,) float32, the master.
        momentum: (P,) float32, zeros before the first step.
        outer_gradient: (P,) float32 or bfloat16; a descent direction has the sign of a gradient.
        lr: outer learning rate.
        momentum_coef: mu of this step, see `effective_momentum`.
    """
    for part in _chunks(anchor, 1):
        gradient = outer_gradient[part].float()
        buffer = momentum[part].mul_(momentum_coef).add_(gradient)
        anchor[part].add_(gradient.add(buffer, alpha=momentum_coef), alpha=-lr)


def effective_momentum(momentum_coef: float, steps: float, sync_every: int) -> float:
    """Momentum by the work done: mu ** (min(steps, H) / H).

    Ten rounds of H / 10 steps then decay the buffer as much as one of H, so short rounds (drains, rejoins) do not
    fling the anchor about.

    Args:
        momentum_coef: mu of a full round, 0 <= mu < 1.
        steps: weighted mean of the round's inner steps, > 0.
        sync_every: H.

    Raises:
        ConfigError: steps is not above 0.
    """
    if not steps > 0:
        raise ConfigError(f"steps={steps}: a round holds more than 0 inner steps; refuse empty contributions")
    return float(momentum_coef ** (min(steps, sync_every) / sync_every))


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
