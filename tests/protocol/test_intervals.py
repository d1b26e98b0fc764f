from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_diloco.protocol.intervals import IntervalSet

RANGE = st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda pair: (pair[0], sum(pair)))


@given(st.lists(RANGE, max_size=12), RANGE)
def test_an_interval_set_agrees_with_a_set_of_integers(ranges: list[tuple[int, int]], probe: tuple[int, int]) -> None:
    intervals, reference = IntervalSet(), set()
    for start, stop in ranges:
        if reference & set(range(start, stop)):
            with pytest.raises(ValueError, match="may be added once"):
                intervals.add(start, stop)
        else:
            intervals.add(start, stop)
            reference |= set(range(start, stop))

    inside = set(range(*probe)) & reference
    assert intervals.size == len(reference)
    assert intervals.overlap(*probe) == len(inside)
    assert [i for a, b in intervals.missing(*probe) for i in range(a, b)] == sorted(set(range(*probe)) - inside)
    assert all(stop < start for (_, stop), (start, _) in zip(list(intervals), list(intervals)[1:], strict=False))


@given(st.lists(RANGE, max_size=12), st.integers(0, 50), RANGE)
def test_settled_integers_are_kept_as_a_number_and_cannot_be_added(
    ranges: list[tuple[int, int]], floor: int, probe: tuple[int, int]
) -> None:
    intervals, reference = IntervalSet(), set()
    for start, stop in ranges:
        if not reference & set(range(start, stop)):
            intervals.add(start, stop)
            reference |= set(range(start, stop))
    intervals.settle(floor)

    floor = intervals.floor
    inside = set(range(*probe)) & reference
    assert intervals.size == len(reference)
    assert intervals.num_settled == len([i for i in reference if i < floor])
    assert all(start >= floor for start, _ in intervals)
    assert intervals.overlap(*probe) == len(inside | {i for i in range(*probe) if i < floor})
    gaps = [i for a, b in intervals.missing(*probe) for i in range(a, b)]
    assert gaps == sorted(i for i in range(*probe) if i >= floor and i not in reference)
    again = IntervalSet(intervals, floor=floor, num_settled=intervals.num_settled)
    assert (again, again.size) == (intervals, intervals.size)


def test_touching_ranges_become_one() -> None:
    assert list(IntervalSet([(0, 5), (10, 15), (5, 10)])) == [(0, 15)]


def test_a_copy_is_equal_and_other_sets_are_not() -> None:
    assert IntervalSet([(0, 5)]) == IntervalSet(IntervalSet([(0, 3), (3, 5)]))
    assert IntervalSet([(0, 5)]) != IntervalSet([(0, 4)])
