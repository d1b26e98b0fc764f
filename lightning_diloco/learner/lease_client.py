"""A learner's leases as the thread that trains sees them: it takes what is there, and says what it trained on.

Asking for more, and hearing of it, is done by the link's threads; nothing here waits for the network, the very first
leases apart: before them there is nothing to train on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from lightning_diloco.errors import JoinError
from lightning_diloco.protocol.data_ranges import Catalogue, Lease, Piece
from lightning_diloco.protocol.learner.leases import LeaseHolder

FIRST_S = 300.0


class LeaseClient:
    """The leases of one link.

    Args:
        lessee: of its machine.
        changed: the machine's lock, notified after every event.
        catalogue: the data that is read.
        raise_error: raises what stopped the link, if anything did.
    """

    def __init__(
        self,
        lessee: LeaseHolder,
        changed: threading.Condition,
        catalogue: Catalogue,
        raise_error: Callable[[], None],
    ) -> None:
        self._lessee = lessee
        self._changed = changed
        self._raise_error = raise_error
        self._pieces: list[Piece] = []
        with changed:
            lessee.catalogue = catalogue

    def take(self) -> Lease | None:
        """The next range to read, if one is there."""
        with self._changed:
            return self._lessee.take()

    def first(self) -> Lease:
        """Wait for a range: nothing has been read yet.

        Raises:
            JoinError: none came.
        """
        if (lease := self.within(FIRST_S)) is None:
            raise JoinError(
                f"the syncer leased no data to this learner within {FIRST_S:.0f} s; it must be reachable when "
                "training begins; look at its log and at `diloco status`"
            )
        return lease

    def within(self, for_s: float) -> Lease | None:
        """Wait so long for a range."""
        taken: list[Lease] = []

        def has_come() -> bool:
            self._raise_error()
            taken.extend(lease for lease in [self._lessee.take()] if lease is not None)
            return bool(taken)

        with self._changed:
            return taken[0] if self._changed.wait_for(has_come, for_s) else None

    def need(self, num_ranges: int) -> None:
        """So many ranges are in one batch: have more of them at hand."""
        with self._changed:
            self._lessee.need(num_ranges)

    def holds(self, number: int) -> bool:
        """Whether a lease that was taken is still this learner's."""
        with self._changed:
            return self._lessee.holds(number)

    def ended(self, lease: Lease) -> None:
        """The source ends with this range, or before it."""
        with self._changed:
            self._lessee.ended(lease)

    def trained(self, pieces: Iterable[Piece]) -> None:
        """These are in the step that is being computed."""
        self._pieces += pieces

    def collect(self) -> tuple[Piece, ...]:
        """All that was read since the last call: the step is done."""
        pieces, self._pieces = tuple(self._pieces), []
        return pieces

    @property
    def num_repeated(self) -> int:
        """Tokens trained on without a lease."""
        return self._lessee.num_repeated
