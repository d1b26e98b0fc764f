"""Checkpoints of a learner with several ranks: each rank writes and reads its own part, and all parts count or none.

1. Rank 0 decides when a checkpoint is due, and announces it in the sums of a step (`Agreement`). All ranks take their
   parts between the same two batches.
2. The ranks' writing threads wait for each other twice, beside training. When all parts are written, rank 0 writes the
   checkpoint that names them. Then each rank removes those of its parts that no checkpoint names any more.
3. When a learner restarts, rank 0 offers the complete checkpoints of the same layout, the best first. All ranks take
   the first checkpoint of which every rank can take its part.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_diloco.devices.part import Box
from lightning_diloco.learner.ranks.group import Ranks
from lightning_diloco.storage.checkpoint_file import Checkpoint
from lightning_diloco.strategy.recovery.checkpointer import Found, LearnerCheckpointer, tried

log = logging.getLogger(__name__)


class RanksCheckpointer(LearnerCheckpointer):
    """The checkpointer of one rank; see `LearnerCheckpointer` for the other arguments.

    Args:
        ranks: the ranks of this learner.

    Attributes:
        is_agreed: whether all ranks take a checkpoint before the next batch.
    """

    def __init__(self, *args: Any, ranks: Ranks, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ranks = ranks
        self.is_agreed = False

    def _is_due(self) -> bool:
        return self.is_agreed

    def _find(self) -> Found | None:
        offers = self._offers() if self._ranks.rank == 0 else iter(())
        while True:
            mine = next(((entry.learner, entry.step, whole.parts) for entry, whole in offers), None)
            offer, *_ = self._ranks.share(mine)
            if offer is None:
                return None
            learner, step, digests = offer
            found = self._own_part(learner, step, digests[self._ranks.rank])
            if all(self._ranks.share(found is not None)):
                return found

    def _own_part(self, learner: str, step: int, digest: str) -> Found | None:
        assert self._store is not None
        part = tried(partial(self._store.read_part, learner, self._ranks.rank, digest))
        return None if part is None else self._fitting(learner, step, part)

    def _write(self, part: Checkpoint, written: threading.Event) -> None:
        assert self._store is not None
        digest = None
        with self._telling():
            digest = self._store.write_part(self._ranks.rank, part)
        try:
            self._complete(part, self._ranks.share(digest))
        except RuntimeError as error:  # a rank has ended, so this learner ends; the pulse reports it
            log.info("a checkpoint was not completed: %s", error)
        written.set()

    def _complete(self, part: Checkpoint, digests: Sequence[str | None]) -> None:
        """Complete the checkpoint if all parts were written; each rank then removes its unnamed parts.

        Args:
            part: this rank's part.
            digests: digests of the parts by rank; None for a part that was not written.
        """
        assert self._store is not None
        store, learner, named = self._store, part.learner, None
        if self._ranks.rank == 0:
            with self._telling():
                if None not in digests:
                    store.write(replace(part, state={}, parts=tuple(map(str, digests))))
                    named = sorted(store.parts_named(learner))
        named, *_ = self._ranks.share(named)
        self._is_stored = named is not None
        if named is not None:
            ours = (self._ranks.rank, self._ranks.size)
            tried(partial(store.remove_parts, learner, ours, set(named)))

    def _watch_for_markers(self) -> None:
        if self._ranks.rank == 0:
            super()._watch_for_markers()


def layout_of(num_ranks: int, boxes: Sequence[Mapping[str, Box]] | None) -> str:
    """Describe how ranks hold a model; equal layouts have equal descriptions.

    Args:
        num_ranks: number of ranks of the learner.
        boxes: each rank's box of each parameter; None: each rank holds whole parameters.
    """
    if boxes is None:
        return f"{num_ranks} ranks that hold all of it"
    digest = hashlib.sha256(json.dumps(boxes, sort_keys=True).encode()).hexdigest()
    return f"{num_ranks} ranks that hold parts of it (layout {digest[:12]})"
