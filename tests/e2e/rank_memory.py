"""One rank of `two_ranks.py` with a larger model. It writes the memory that exchanging took to DIR/memory.RANK.

    rank_memory.py DIR RANK SIZE LINE STEPS CUT BUFFERS

BUFFERS is "own", or "whole" for buffers as long as whole fragments, as if this rank gathered them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lightning_diloco.config import LearnerConfig
from lightning_diloco.devices.part import PartFragments
from lightning_diloco.learner.ranks.follower import Follower
from lightning_diloco.learner.ranks.leader import Leader
from lightning_diloco.learner.ranks.memory import FURTHER_BUFFERS, SPARE_BUFFERS, footprint
from tests.e2e import two_ranks
from tests.resident import forget_peak, resident_at_most, resident_now

SHAPES = {f"p{k}": (1024, 2048) for k in range(8)}  # not cut into slices, so each rank holds a part of every parameter
taken: dict[str, int] = {}


def watch(role: type[Follower] | type[Leader]) -> None:
    """Measure from the time when the parameters exist until all updates have landed."""
    start, finish = role.start, role.finish

    def started(self: Any, *args: Any) -> None:
        forget_peak()
        taken["before"] = resident_now(os.getpid())
        start(self, *args)

    def finished(self: Any) -> bool:
        is_last = finish(self)
        taken["peak"] = resident_at_most(os.getpid())
        found = stated(self)
        spare = self.device._own._spare
        taken["further"] = max(0, len(spare) - SPARE_BUFFERS)  # allocated for fragments in transit at the same time
        taken["stated"] = found.peak + taken["further"] * found.further // FURTHER_BUFFERS
        return is_last

    role.start, role.finish = started, finished  # type: ignore[method-assign, assignment]


def stated(link: Any) -> Any:
    """Return the memory that the strategy states."""
    device = link.device._own
    where = {"rank": link._ranks.rank, "size": link._ranks.size, "part": getattr(device, "part", None)}
    return footprint(link.plan, link.config, LearnerConfig(), **where)


if __name__ == "__main__":
    folder, rank, size, line, steps, cut, buffers = sys.argv[1:]
    two_ranks.SHAPES = SHAPES
    if buffers == "whole":
        new = PartFragments._new_buffer

        def longer(self: Any) -> Any:
            self._buffer_numel = max(whole.padded_numel for whole in self.part.wholes)
            return new(self)

        PartFragments._new_buffer = longer  # type: ignore[method-assign]
    watch(Leader if rank == "0" else Follower)
    two_ranks.main(Path(folder), int(rank), int(size), line, steps=int(steps), cut=cut)
    Path(folder, f"memory.{rank}").write_text(json.dumps(taken))
