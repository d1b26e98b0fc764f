"""The training thread's access to data leases: takes ranges, and reports what it trained on.

1. The link's threads request and receive leases ahead of need. If leases run low, `take` requests more at once, because
   a model with steps of 1 ms trains on a hundred ranges between two ticks of the link.
2. The training thread waits for its first lease, because it has nothing to train on before.
3. Later it waits for a lease only while the syncer can be reached and has not answered the request. After a wait that
   brought no lease, it does not wait again until a lease has come.

Source: our choice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from lightning_diloco.errors import JoinError
from lightning_diloco.protocol.data_ranges import Catalogue, Lease, Piece
from lightning_diloco.protocol.learner.leases import LeaseHolder

FIRST_S = 300.0
LOOK_S = 0.1


class LeaseClient:
    """The data leases of one link.

    Args:
        lessee: leases in the state machine.
        changed: lock of the state machine, notified after each event.
        catalogue: the data to read.
        raise_error: raises the error that stopped the link, if there is one.
        ask: makes the state machine send the request for leases that is due.
        is_online: returns whether the syncer can be reached.
        waited: told how many seconds the training thread has waited for an answer.
    """

    def __init__(
        self,
        lessee: LeaseHolder,
        changed: threading.Condition,
        catalogue: Catalogue,
        raise_error: Callable[[], None],
        *,
        ask: Callable[[], object],
        is_online: Callable[[], bool],
        waited: Callable[[float], object],
    ) -> None:
        self._lessee = lessee
        self._changed = changed
        self._raise_error = raise_error
        self._ask, self._is_online, self._waited = ask, is_online, waited
        self._may_wait = True
        self._pieces: list[Piece] = []
        with changed:
            lessee.catalogue = catalogue

    def take(self) -> Lease | None:
        """Take the next range to read; None if there is none."""
        with self._changed:
            lease = self._lessee.take()
            self._may_wait |= lease is not None
            if self._lessee.is_low and self._is_online():
                self._ask()
            return lease

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

    def answer(self, for_s: float) -> Lease | None:
        """Wait up to for_s seconds for the syncer to answer a request.

        Returns:
            A range; None if the syncer cannot be reached, has none to give, or did not answer this time or the last.
        """
        if not self._may_wait:
            return None
        began_s = time.perf_counter()
        lease = self.within(for_s, lambda: self._lessee.was_denied or not self._is_online())
        self._waited(time.perf_counter() - began_s)
        self._may_wait = lease is not None or self._lessee.was_denied
        return lease

    def within(self, for_s: float, is_hopeless: Callable[[], bool] = lambda: False) -> Lease | None:
        """Wait up to for_s seconds for a range, or until waiting is hopeless; returns None if none came."""
        until_s = time.monotonic() + for_s
        with self._changed:
            while (lease := self.take()) is None:
                self._raise_error()
                left_s = until_s - time.monotonic()
                if left_s <= 0.0 or is_hopeless():
                    break
                self._changed.wait(min(LOOK_S, left_s))  # nothing is notified when the syncer cannot be reached
            return lease

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
