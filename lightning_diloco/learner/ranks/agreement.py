"""What the ranks of a learner know of each other when a step ends: sums over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One rank's part of it, or the sum.

    Args:
        tokens: of this step.
        num_failed: ranks that met an error.
        num_asked: ranks that were asked to end by a signal.
        fleet_tokens: rank 0 says what all learners of the run have seen when the step begins.
        saves: rank 0 says that all take a checkpoint before the next batch.
        stops: a rank says that this is the last step of training.
        is_over: rank 0 says that there are no more boundaries.
        is_last: rank 0 says that nobody else is in the run.
        is_drained: rank 0 says that all that was trained is merged.
        land, snapshot: rank 0 says what is done at this boundary, by fragment.
    """

    tokens: int = 0
    num_failed: int = 0
    num_asked: int = 0
    fleet_tokens: int = 0
    saves: bool = False
    stops: bool = False
    is_over: bool = False
    is_last: bool = False
    is_drained: bool = False
    land: tuple[int, ...] = ()
    snapshot: tuple[int, ...] = ()

    def numbers(self, num_fragments: int) -> list[int]:
        """As integers that can be summed."""
        flags = [int(p in marked) for marked in (self.land, self.snapshot) for p in range(num_fragments)]
        counts = [self.tokens, self.num_failed, self.num_asked, self.fleet_tokens]
        return [*counts, *map(int, (self.saves, self.stops, self.is_over, self.is_last, self.is_drained)), *flags]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Agreement:
        """The inverse of `numbers`."""
        tokens, num_failed, num_asked, fleet_tokens, saves, stops, is_over, is_last, is_drained, *flags = numbers
        half = len(flags) // 2
        land, snapshot = (tuple(p for p, flag in enumerate(part) if flag) for part in (flags[:half], flags[half:]))
        return cls(
            tokens=tokens,
            num_failed=num_failed,
            num_asked=num_asked,
            fleet_tokens=fleet_tokens,
            saves=bool(saves),
            stops=bool(stops),
            is_over=bool(is_over),
            is_last=bool(is_last),
            is_drained=bool(is_drained),
            land=land,
            snapshot=snapshot,
        )
