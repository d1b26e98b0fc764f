"""Verdicts on contributions in rounds of four learners, one of them broken."""

from __future__ import annotations

import pytest
import torch

from lightning_diloco.core.encoded import Measured
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.actions import Contribution
from lightning_diloco.protocol.events import Verdict
from lightning_diloco.syncer.judging import Judge
from lightning_diloco.syncer.norm_guard import NormGuard


class Rounds:
    """Judges rounds of a, b, c and mad to one fragment of two slices."""

    def __init__(self) -> None:
        self.judge = Judge(NormGuard())
        self.seq = 0

    def next(self, mad: float, cosine: float = 0.5, *, names: str = "a b c mad", on_trial: bool = False) -> Verdict:
        """Return the verdict on mad, whose contribution has this norm; those of the others are about 1."""
        self.seq += 1
        ready = messages.Ready(fragment=0, seq=self.seq, base=0, generation=0, start=0, stop=8, steps=4)
        there = [Contribution(name, name, 1, ready, 4) for name in names.split()]
        norms = [mad if c.learner == "mad" else 1.0 + 0.01 * self.seq for c in there]
        cosines_MM = torch.full((len(there),) * 2, 0.5, dtype=torch.float64).fill_diagonal_(1.0)
        cosines_MM[-1, :-1] = cosines_MM[:-1, -1] = cosine
        norms_M = torch.tensor(norms, dtype=torch.float64)
        gram_EMM = (cosines_MM * norms_M[:, None] * norms_M / 2).expand(2, -1, -1)
        split = len(there) - on_trial
        found = self.judge.judge(0, there[:split], there[split:], Measured(gram_EMM))
        assert len(found.max_norms) == split
        assert not any(v.odd for session, v in found.verdicts.items() if session != "mad"), (
            "honest learners are not odd"
        )
        return found.verdicts["mad"]


@pytest.fixture
def rounds() -> Rounds:
    return Rounds()


@pytest.mark.parametrize("norm", [11.0, 1e10, 6.7e33, 1e44])
def test_a_contribution_that_is_much_too_long_is_refused_in_the_first_round_and_later(
    rounds: Rounds, norm: float
) -> None:
    for _ in range(20):
        verdict = rounds.next(norm * (1 + 0.1 * rounds.seq))
        assert verdict.is_refused
        assert "at most 1" in str(verdict.odd)


@pytest.mark.parametrize("norm", [0.0, 1e-6])
def test_a_contribution_that_is_nearly_zero_is_odd_and_not_refused(rounds: Rounds, norm: float) -> None:
    verdict = rounds.next(norm)

    assert verdict.odd
    assert not verdict.is_refused


@pytest.mark.parametrize("norm", [0.01, 0.1, 1.0, 3.0])
def test_learners_of_another_pace_are_not_odd(rounds: Rounds, norm: float) -> None:
    assert rounds.next(norm) == Verdict(None, likeness=0.5, is_telling=True)


def test_a_repeated_contribution_is_refused(rounds: Rounds) -> None:
    assert rounds.next(1.5).odd is None
    verdict = rounds.next(1.5)
    assert verdict.is_refused
    assert "to the last bit" in str(verdict.odd)


def test_likeness_is_the_median_and_needs_two_others(rounds: Rounds) -> None:
    assert rounds.next(1.0, -0.7).likeness == -0.7
    assert rounds.next(1.1, -0.7, names="a mad").likeness is None
    assert rounds.next(1.2, -0.7, on_trial=True).likeness == -0.7


def test_with_two_learners_none_is_refused(rounds: Rounds) -> None:
    assert rounds.next(1e10, names="a mad").odd is None
    assert rounds.next(0.0, names="a mad").odd is None
