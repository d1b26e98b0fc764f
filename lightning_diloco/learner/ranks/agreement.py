"""The values that the ranks of a learner exchange in each step, as sums over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The values of one rank, or their sums over all ranks.

    Any rank sets `tokens`, `num_failed`, `num_asked` and `stops`. Only rank 0 sets the others.

    Args:
        tokens: tokens in this step's batches.
        num_failed: number of ranks that have failed.
        num_asked: number of ranks that a signal has asked to end.
        fleet_tokens: tokens that all learners of the run had seen when the step began.
        saves: all ranks take a checkpoint before the next batch.
        stops: this is the last step of training.
        is_over: no more boundaries follow.
        is_last: no other learner is in the run.
        is_drained: all of the learner's work is merged.
        land, snapshot: fragments that all ranks land, and those that they snapshot, at this boundary.
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
        """Return the values as integers that can be summed over ranks."""
        flags = [int(p in marked) for marked in (self.land, self.snapshot) for p in range(num_fragments)]
        return [*(int(getattr(self, each.name)) for each in _scalars()), *flags]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Agreement:
        """Return the agreement with these numbers; the inverse of `numbers`."""
        scalars, flags = numbers[: len(_scalars())], numbers[len(_scalars()) :]
        named = {each.name: type(each.default)(number) for each, number in zip(_scalars(), scalars, strict=True)}
        half = len(flags) // 2
        land, snapshot = (tuple(p for p, flag in enumerate(part) if flag) for part in (flags[:half], flags[half:]))
        return cls(**named, land=land, snapshot=snapshot)


def _scalars() -> list[Field[Any]]:
    return [each for each in fields(Agreement) if each.default != ()]
