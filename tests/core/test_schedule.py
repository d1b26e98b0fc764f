"""The schedule: each fragment is due once per period, at the step of the paper."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_diloco.core.schedule import fragment_due
from lightning_diloco.errors import ConfigError


@settings(derandomize=True, deadline=None)
@given(st.data())
def test_every_fragment_is_due_once_per_period_at_its_step(data: st.DataObject) -> None:
    sync_every = data.draw(st.integers(1, 200))
    num_fragments = data.draw(st.integers(1, sync_every))
    period = data.draw(st.integers(0, 3))
    due = {
        position: p
        for position in range(1, sync_every + 1)
        if (p := fragment_due(period * sync_every + position, sync_every=sync_every, num_fragments=num_fragments))
        is not None
    }
    assert due == {(p + 1) * sync_every // num_fragments: p for p in range(num_fragments)}


def test_one_fragment_is_due_each_step_when_there_are_as_many_as_steps() -> None:
    assert [fragment_due(step, sync_every=24, num_fragments=24) for step in range(1, 50)] == [*range(24)] * 2 + [0]


@pytest.mark.parametrize(("step", "sync_every", "num_fragments"), [(0, 24, 24), (1, 4, 5), (1, 4, 0)])
def test_numbers_out_of_range_are_refused(step: int, sync_every: int, num_fragments: int) -> None:
    with pytest.raises(ConfigError, match=f"step={step}, sync_every={sync_every}, num_fragments={num_fragments}"):
        fragment_due(step, sync_every=sync_every, num_fragments=num_fragments)
