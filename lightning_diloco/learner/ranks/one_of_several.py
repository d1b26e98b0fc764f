"""What links of a learner's ranks have in common: ranks agree at every step boundary, and let go of each other."""

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
    """Mixin: the link of one of several ranks; see the final classes for the other arguments.

    Args:
        ranks: of this learner.
        boxes: what each rank holds of each parameter; empty: all of it.
        kind: how the ranks' devices work together.
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
        self._is_over = False  # whether ranks need nothing of each other any more

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
        """Groups of ranks stay if this ended in any other way: a rank may never answer again."""
        if threads_have_ended and self._is_over:
            self._ranks.close()
        super()._let_go(threads_have_ended=threads_have_ended)
