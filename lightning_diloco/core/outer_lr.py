"""The outer learning rate "auto": smaller while successive outer gradients are alike.

1. Momentum adds up what gradients have in common. A gradient that keeps a correlation of rho from round to round moves
   the anchor by lr / (1 - mu rho) times itself. With

       lr = 1 - mu rho

   this factor is 1, and the anchor moves as far as the learners did. rho is near 1 at the start of a training, when a
   fixed rate is too large, and falls.
2. rho is measured between the outer gradient g of a round and the momentum buffer b of the rounds before it:

       part = (g . b) / (b . b) * filled / (1 - decay),   rho = part / (1 + mu - mu part)

   A steady gradient fills the buffer to filled * g / (1 - decay), so that part = rho = 1, and filled is 1 minus the
   product of the decays so far. If the correlation of two gradients is rho**k for k rounds between them, then
   part = rho (1 + mu) / (1 + mu rho).
3. The buffer holds the work of several rounds. Its noise is therefore the same if this work is divided into other
   rounds, and so is rho. The cosine of two successive gradients is lower the fewer learners take part in a round.
4. rho is averaged, with half the weight on the last unit of work, and counts as at least SMALLEST_RHO: gradients that
   have nothing in common are noise, with which a larger rate does harm.
5. In a fragment of more than MEASURED_NUMEL values, only every n-th block is measured. This takes a tenth of the time
   of an outer step.

Sums are taken in one order, so that each machine gets the same bits.

Shapes: _P flat fragment, _BS (blocks, block size).
Source: our choice, see tests/bench/outer_rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_diloco.core import native
from lightning_diloco.core.blocks import sum_in_order
from lightning_diloco.core.outer import momentum_by_work

SMALLEST_RHO = 0.3
MEASURED_NUMEL = 1 << 22
_KEPT = 0.5


@dataclass(frozen=True, slots=True)
class Correlation:
    """The correlation of a fragment's successive outer gradients.

    Args:
        rho: its average, 0..1; the default is usual at the start of a training.
        filled: filled part of the momentum buffer, 0..1.
    """

    rho: float = 0.7
    filled: float = 0.0

    def lr(self, mu: float) -> float:
        """Return the outer learning rate for momentum `mu`."""
        return 1 - mu * max(self.rho, SMALLEST_RHO)

    def after(self, gradient_P: Tensor, momentum_P: Tensor, *, mu: float, work: float, block_size: int) -> Correlation:
        """Return the correlation with one more round.

        Args:
            gradient_P: the round's outer gradient, bfloat16.
            momentum_P: momentum buffer before the round, float32.
            mu: momentum of a full round.
            work: work of the round, see `momentum_by_work`.
            block_size: P is a multiple of it.
        """
        along, square = momentum_dots(gradient_P, momentum_P, block_size=block_size)
        decay, rho = momentum_by_work(mu, work).decay, self.rho
        if square > 0 and decay < 1:  # decay is rounded to 1 if hardly any work is in the round
            part = min(1.0, max(0.0, along / square * self.filled / (1 - decay)))
            kept = _KEPT ** min(work, 1.0)
            rho = kept * rho + (1 - kept) * part / (1 + mu - mu * part)
        return Correlation(rho, 1 - decay * (1 - self.filled))


def momentum_dots(gradient_P: Tensor, momentum_P: Tensor, *, block_size: int) -> tuple[float, float]:
    """Return the dot products of the momentum buffer with the outer gradient and with itself (rule 5).

    Args:
        gradient_P: bfloat16.
        momentum_P: float32.
        block_size: P is a multiple of it. Products are added up block by block, then within the block.
    """
    numel = gradient_P.numel()
    units, every = native.ranges(numel, block_size), max(1, numel // MEASURED_NUMEL)
    if (kernels := native.kernels_for(gradient_P, 8)) is not None:
        gradient, momentum = native.array(gradient_P), native.array(momentum_P)
        found = native.in_parallel(
            lambda start, stop: kernels.momentum_dots(gradient[start:stop], momentum[start:stop], block_size, every),
            units,
        )
    else:
        found = [
            _dots(*(x[start:stop].view(-1, block_size)[::every] for x in (gradient_P, momentum_P)))
            for start, stop in units
        ]
    along = square = 0.0
    for one, other in found:
        along, square = along + one, square + other
    return along, square


def _dots(gradient_BS: Tensor, momentum_BS: Tensor) -> tuple[float, float]:
    buffer = momentum_BS.double()
    along, square = (sum_in_order(sum_in_order(x * buffer)) for x in (gradient_BS.double(), buffer))
    return float(along), float(square)
