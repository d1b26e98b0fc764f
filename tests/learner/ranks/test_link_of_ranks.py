"""Rank 0 of a learner of several ranks, tested without the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_diloco.learner import member
from lightning_diloco.learner.ranks.leader import Leader
from tests.learner.fleet import Fleet, Learner


class OneRank:
    """`Ranks` of a learner that has rank 0 only."""

    rank, size, silent_s = 0, 1, 0.0

    def __init__(self) -> None:
        self.num_begun, self.told, self.is_closed = 0, list[str](), False
        self.uploads = SimpleNamespace(size=1, give=lambda order, meanwhile, within_s: True)

    def begin(self, numbers: Sequence[int]) -> None:
        self._sums, self.num_begun = list(numbers), self.num_begun + 1

    def end(self) -> list[int]:
        return self._sums

    def tell(self, command: dict[str, Any], payload: Any = None) -> None:
        self.told.append(command["do"])

    def collect(self, command: dict[str, Any], numels: Sequence[int]) -> list[Any]:
        return []

    def pulse(self, crew: Any) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def of_ranks(fleet: Fleet) -> tuple[Learner, OneRank]:
    """Return a learner whose link has ranks."""
    learner, ranks = fleet.learner("l0"), OneRank()
    alone = learner.link
    learner.link = Leader(
        alone._run_options,
        alone._learner,
        fleet.run_dir,
        ranks=ranks,
        connect=learner._connected,  # type: ignore[arg-type]
    )
    step = learner.link.step

    def stepped(tokens: int, unit: str) -> None:
        learner.link.begin_step(tokens)
        step(0, unit)

    learner.link.step = stepped  # type: ignore[method-assign]
    return learner, ranks


@pytest.mark.seconds
def test_the_wait_for_the_last_contributions_is_as_long_as_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "LEAVE_S", 0.0)  # on top of the time to drain
    with Fleet(tmp_path) as fleet:
        learner, ranks = of_ranks(fleet)
        learner.go()
        fleet.until_commits(3)
        learner.enough().done()
        summary = fleet.stop()
    assert learner.is_last
    assert learner.link.is_drained
    assert summary["tokens_merged"] == summary["tokens_seen"] > 0
    assert ranks.is_closed


def test_other_ranks_receive_the_settings_that_they_need(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        learner, ranks = of_ranks(fleet)
        learner.go()
        fleet.until_commits(3)
        learner.enough().done()
    first, *_, last = ranks.told
    assert (first, last) == ("plan", "end")
    assert {"adopt", "go", "encode", "stage"} <= set(ranks.told)
