"""The training thread's access to data leases: takes ranges, and reports what it trained on.

The link's threads request and receive leases. The training thread waits for a lease only at its start, because it has
nothing to train on before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from lightning_diloco.errors import JoinError
from lightning_diloco.protocol.data_ranges import Catalogue, Lease, Piece
from lightning_diloco.protocol.learner.leases import LeaseHolder

FIRST_S = 300.0


class LeaseClient:
    """The data leases of one link.

    Args:
        lessee: leases in the state machine.
        changed: lock of the state machine, notified after each event.
        catalogue: the data to read.
        raise_error: raises the error that stopped the link, if there is one.
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
        """Take the next range to read; None if there is none."""
        with self._changed:
            return self._lessee.take()

    def first(self) -> Lease:
        """Wait for the first range.

        Raises:
            JoinError: none came within FIRST_S.
        """
        if (lease := self.within(FIRST_S)) is None:
            raise JoinError(
                f"the syncer leased no data to this learner within {FIRST_S:.0f} s; it must be reachable when "
                "training begins; look at its log and at `diloco status`"
            )
        return lease

    def within(self, for_s: float) -> Lease | None:
        """Wait up to for_s seconds for a range; returns None if none came."""
        taken: list[Lease] = []

        def has_come() -> bool:
            self._raise_error()
            taken.extend(lease for lease in [self._lessee.take()] if lease is not None)
            return bool(taken)

        with self._changed:
            return taken[0] if self._changed.wait_for(has_come, for_s) else None

    def need(self, num_ranges: int) -> None:
        """Keep enough leases for two batches, of `num_ranges` ranges each."""
        with self._changed:
            self._lessee.need(num_ranges)

    def holds(self, number: int) -> bool:
        """Return whether this learner still holds a lease that it has taken."""
        with self._changed:
            return self._lessee.holds(number)

    def ended(self, lease: Lease) -> None:
        """Note that the source ends with this range or before it."""
        with self._changed:
            self._lessee.ended(lease)

    def trained(self, pieces: Iterable[Piece]) -> None:
        """Note parts of the batches in the current step."""
        self._pieces += pieces

    def collect(self) -> tuple[Piece, ...]:
        """Return the parts noted since the last call, at the end of a step."""
        pieces, self._pieces = tuple(self._pieces), []
        return pieces

    @property
    def num_repeated(self) -> int:
        """Tokens trained on without a lease."""
        return self._lessee.num_repeated
