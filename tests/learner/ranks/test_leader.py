"""Rank 0 of a learner sends nothing to the syncer while another rank is silent."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_diloco.learner.ranks.leader import SILENT_S, Leader
from lightning_diloco.process.threads import Crew
from lightning_diloco.protocol import events, messages


class SilentFor:
    """Ranks, one of which is silent at the first calls."""

    def __init__(self, num_looks: int) -> None:
        self.num_left = num_looks

    @property
    def silent_s(self) -> float:
        self.num_left -= 1
        return SILENT_S if self.num_left >= 0 else 0.0


def leader(ranks: Any, handled: list[events.LearnerEvent]) -> Leader:
    link = Leader.__new__(Leader)
    link._ranks, link._crew = ranks, Crew(pytest.fail)
    link._handle = lambda event: handled.append(event) or 0  # type: ignore[method-assign, func-returns-value]
    return link


def test_messages_wait_until_all_ranks_answer() -> None:
    handled: list[events.LearnerEvent] = []
    ranks, said = SilentFor(3), messages.LeaveNoted(is_last=False)
    leader(ranks, handled)._hear(said)
    assert handled == [events.FromTheSyncer(said)]
    assert ranks.num_left == -1, "it was heard at the first look at which no rank was silent"


def test_the_machine_handles_no_event_while_a_rank_is_silent() -> None:
    handled: list[events.LearnerEvent] = []
    leader(SilentFor(1), handled)._tick()
    assert handled == []
    leader(SilentFor(0), handled)._tick()
    assert handled == [events.Tick()]
