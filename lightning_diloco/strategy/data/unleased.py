"""What to read while no lease is to be had, because the syncer cannot be reached: training never waits.

1. Ranges of the epoch that is being read which this learner has not read, leased or not; when there are none left, the
   next epoch's, and so on. So in an outage of any length a learner reads no sample twice in an epoch, and all of them
   before it begins the next.
2. Each learner has an order of its own: those that are cut off together read different data for as long as there are.
3. All of it may be leased by somebody later, or have been: it counts as repeated (`protocol/learner/leases.py`). After
   the outage the table leases this epoch's ranges as if nothing had happened, so a sample may be trained on twice in
   that epoch.

Source: our choice.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from lightning_diloco.protocol.data_ranges import Catalogue, Lease


class Unleased:
    """Chooses for one learner.

    Args:
        catalogue: of the data.
        seed: of this learner's order.
    """

    def __init__(self, catalogue: Catalogue, seed: int) -> None:
        self._catalogue, self._seed = catalogue, seed
        self._begin(0)

    def leased(self, lease: Lease) -> None:
        """This range is read on a lease."""
        if lease.epoch > self._epoch:
            self._begin(lease.epoch)
        if lease.epoch == self._epoch:
            self._read.add((lease.source, lease.index))

    def next(self) -> Lease:
        """A range to read without a lease; its number says nothing."""
        while True:
            for where in self._left:
                if where not in self._read:
                    self._read.add(where)
                    return Lease(0, self._epoch, *where)
            self._begin(self._epoch + 1)

    def ended(self, lease: Lease) -> None:
        """The source ends with this range, or before it."""
        if lease.epoch == self._epoch:
            self._ended.add(lease.source)

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._read: set[tuple[int, int]] = set()
        self._ended: set[int] = set()
        self._left = self._order(random.Random(f"{self._seed}/{epoch}"))

    def _order(self, chance: random.Random) -> Iterator[tuple[int, int]]:
        """All (source, index) of an epoch, once each."""
        num_sources, num_ranges = self._catalogue.num_sources, self._catalogue.num_ranges
        if num_ranges is None:  # a source is read from its beginning, for it comes in order
            for source in chance.sample(range(num_sources), num_sources):
                for index in itertools.count():
                    if source in self._ended:
                        break
                    yield source, index
            return
        total = num_sources * num_ranges  # maybe millions: a walk whose step has no divisor in common with them
        first = chance.randrange(total)
        step = chance.randrange(1, total + 1)
        while math.gcd(step, total) > 1:
            step = chance.randrange(1, total + 1)
        for k in range(total):
            yield divmod((first + k * step) % total, num_ranges)
