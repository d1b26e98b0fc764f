"""Sums over ranks carry the values of rank 0 and the flags of any rank."""

from __future__ import annotations

import pytest

from lightning_diloco.learner.ranks.agreement import Agreement

NUM_FRAGMENTS = 3
SAID = Agreement(
    tokens=5,
    num_failed=1,
    num_asked=1,
    fleet_tokens=1 << 52,
    saves=True,
    stops=True,
    is_over=True,
    is_last=True,
    land=(0, 2),
    snapshot=(1,),
)


def test_all_ranks_know_the_values_of_rank_0():
    other = Agreement(tokens=7, num_failed=1, num_asked=1)
    sums = [a + b for a, b in zip(SAID.numbers(NUM_FRAGMENTS), other.numbers(NUM_FRAGMENTS), strict=True)]
    found = Agreement.of(sums)
    assert (found.tokens, found.num_failed, found.num_asked) == (12, 2, 2)
    rest = ("fleet_tokens", "saves", "stops", "is_over", "is_last", "land", "snapshot")
    assert [getattr(found, name) for name in rest] == [getattr(SAID, name) for name in rest]


@pytest.mark.parametrize("flag", ["saves", "stops", "is_over", "is_last"])
def test_flags_are_not_mixed_up(flag):
    said = Agreement(**{flag: True})
    assert Agreement.of(said.numbers(NUM_FRAGMENTS)) == said
