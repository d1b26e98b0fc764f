"""What the ranks of a learner know of each other when a step ends: sums over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, dataclass, fields
from typing import Any


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
        return [*(int(getattr(self, each.name)) for each in _scalars()), *flags]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Agreement:
        """The inverse of `numbers`."""
        scalars, flags = numbers[: len(_scalars())], numbers[len(_scalars()) :]
        named = {each.name: type(each.default)(number) for each, number in zip(_scalars(), scalars, strict=True)}
        half = len(flags) // 2
        land, snapshot = (tuple(p for p, flag in enumerate(part) if flag) for part in (flags[:half], flags[half:]))
        return cls(**named, land=land, snapshot=snapshot)


def _scalars() -> list[Field[Any]]:
    return [each for each in fields(Agreement) if each.default != ()]
