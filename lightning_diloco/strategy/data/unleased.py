"""Chooses ranges to read while the syncer cannot be reached and gives no leases.

1. It chooses ranges of the present epoch that this learner has not read, then those of the next epoch, and so on. So
   even in a long outage, a learner reads no sample twice in an epoch, and reads all samples before the next epoch.
2. Each learner has its own order, so that learners that are cut off together read different data if possible.
3. Other learners may have leased these ranges or may lease them later, so they count as repeated
   (`protocol/learner/leases.py`). After the outage the table leases the ranges of this epoch as before; a sample may
   then be trained twice in the epoch.

Source: our choice.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from lightning_diloco.protocol.data_ranges import Catalogue, Lease


class Unleased:
    """Chooses ranges for one learner.

    Args:
        catalogue: catalogue of the data.
        seed: seed of this learner's order.
    """

    def __init__(self, catalogue: Catalogue, seed: int) -> None:
        self._catalogue, self._seed = catalogue, seed
        self._begin(0)

    def leased(self, lease: Lease) -> None:
        """Note that this range is read with a lease."""
        if lease.epoch > self._epoch:
            self._begin(lease.epoch)
        if lease.epoch == self._epoch:
            self._read.add((lease.source, lease.index))

    def next(self) -> Lease:
        """Return a range to read without a lease; its number has no meaning."""
        while True:
            for where in self._left:
                if where not in self._read:
                    self._read.add(where)
                    return Lease(0, self._epoch, *where)
            self._begin(self._epoch + 1)

    def ended(self, lease: Lease) -> None:
        """Note that the source ends with this range or before it."""
        if lease.epoch == self._epoch:
            self._ended.add(lease.source)

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._read: set[tuple[int, int]] = set()
        self._ended: set[int] = set()
        self._left = self._order(random.Random(f"{self._seed}/{epoch}"))

    def _order(self, chance: random.Random) -> Iterator[tuple[int, int]]:
        """Yield each (source, index) of an epoch once."""
        num_sources, num_ranges = self._catalogue.num_sources, self._catalogue.num_ranges
        if num_ranges is None:  # a stream, which is read in order
            for source in chance.sample(range(num_sources), num_sources):
                for index in itertools.count():
                    if source in self._ended:
                        break
                    yield source, index
            return
        total = num_sources * num_ranges  # may be millions: walk with a step that is coprime to it
        first = chance.randrange(total)
        step = chance.randrange(1, total + 1)
        while math.gcd(step, total) > 1:
            step = chance.randrange(1, total + 1)
        for k in range(total):
            yield divmod((first + k * step) % total, num_ranges)
