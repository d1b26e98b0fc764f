"""Common part of the links of a learner's ranks: they agree at every step boundary, and release each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightning_diloco.errors import DiLoCoError
from lightning_diloco.learner.link import Link
from lightning_diloco.learner.ranks.agreement import Agreement
from lightning_diloco.learner.ranks.group import Ranks
from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice


class OneOfSeveral(Link):
    """Mixin for the link of one of several ranks; see `Leader` and `Follower` for the other arguments.

    Args:
        ranks: the ranks of this learner.
        boxes: for each rank, its box of each parameter; empty: each rank holds whole parameters.
        kind: class of the device that coordinates the ranks' devices.
    """

    def __init__(
        self,
        *args: Any,
        ranks: Ranks,
        boxes: Sequence[Mapping[str, Any]] = (),
        kind: type[ReplicatedDevice] = ReplicatedDevice,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._ranks = ranks
        self._in_front = partial(kind, ranks=ranks, boxes=boxes, stopping=self._crew.stopping)
        self._is_over = False  # whether the ranks no longer need each other

    def _begin(self, **said: Any) -> None:
        agreement = Agreement(**{"num_failed": int(self._error is not None), **said})
        self._ranks.begin(agreement.numbers(self.plan.num_fragments))

    def _agree(self) -> Agreement:
        self.agreed = Agreement.of(self._ranks.end())
        self._raise_error()
        if self.agreed.num_failed:
            raise DiLoCoError("another rank of this learner has stopped; its own output says why; start it again")
        return self.agreed

    def _let_go(self, *, threads_have_ended: bool) -> None:
        """See `Link._let_go`. After a failure the groups of the ranks are not closed: a rank may never answer again."""
        if threads_have_ended and self._is_over:
            self._ranks.close()
        super()._let_go(threads_have_ended=threads_have_ended)
