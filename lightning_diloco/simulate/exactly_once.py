"""Checks that every range of samples is merged once per epoch, by the commits and the samples that were read.

1. A range is done at most once. Every sample of a range that is done is merged in every fragment, and so are the
   samples that a later lease of the range skips.
2. A range that was leased and is not done is held by a live learner or waits to be leased again. Every range of a
   finished epoch was leased.
3. A sample that is merged twice is counted as repeated.

The check does not use the arithmetic of the lease table.
"""

from __future__ import annotations

from collections import Counter

from lightning_diloco.protocol.data_ranges import Lease
from lightning_diloco.protocol.syncer import records
from lightning_diloco.simulate.observed import Observed
from lightning_diloco.simulate.reading import Data, Sample

Range = tuple[int, int, int]


def violation(fleet: Observed) -> str | None:
    """Describe a violation, or return None; checks only "carry", because other landing rules drop tokens by design."""
    data = next((learner.pace.data for learner in fleet.learners.values() if learner.pace.data is not None), None)
    if data is None or not all(learner.pace.align == "carry" for learner in fleet.learners.values()):
        return None
    counts = merged(fleet)
    leased, done = _history(fleet)
    if twice := [name for name, times in done.items() if times > 1]:
        return f"ranges {twice} were done more than once"
    for name in leased:
        skipped = data.samples(*name)[: max(lease.skip for lease in leased[name])]
        wanted = data.samples(*name) if name in done else skipped
        for p, count in enumerate(counts):
            if lost := [sample for sample in wanted if not count[sample]]:
                return f"samples {lost} of range {name} were never merged in fragment {p}"
    return _astray(fleet, leased, done) or _left_out(fleet, data, leased) or _uncounted(fleet, counts)


def merged(fleet: Observed) -> list[Counter[Sample]]:
    """Return how often each sample was merged, per fragment."""
    counts: list[Counter[Sample]] = [Counter() for _ in fleet.syncer.disk.anchors]
    for entry in fleet.syncer.disk.log:
        if isinstance(entry.record, records.CommitRecord):
            for merge in entry.record.merges:
                reader = fleet.learners[merge.session].reader
                tokens = reader.trained[merge.ready.start : merge.stop] if reader else []
                counts[entry.record.fragment].update(sample for sample in tokens if sample is not None)
    return counts


def _history(fleet: Observed) -> tuple[dict[Range, list[Lease]], Counter[Range]]:
    """Return all leases of each range, and how often each range was done."""
    leases: dict[int, Lease] = {}
    leased: dict[Range, list[Lease]] = {}
    done: Counter[Range] = Counter()
    for entry in fleet.syncer.disk.log:
        match entry.record:
            case records.RangesLeased(grants=grants):
                for grant in grants:
                    leases[grant.lease.number] = grant.lease
                    leased.setdefault(_name(grant.lease), []).append(grant.lease)
            case records.RangesSettled(done=numbers):
                done.update(_name(leases[number]) for number in numbers)
    return leased, done


def _astray(fleet: Observed, leased: dict[Range, list[Lease]], done: Counter[Range]) -> str | None:
    table, roster = fleet.syncer.state.leases, fleet.syncer.state.roster
    there = {_name(h.lease) for h in table.held if (m := roster.get(h.session)) is not None and m.is_live}
    there |= {_name(holding.lease) for holding in table.pool}
    astray = leased.keys() - done.keys() - there
    return f"ranges {sorted(astray)} are neither done nor leased nor waiting" if astray else None


def _left_out(fleet: Observed, data: Data, leased: dict[Range, list[Lease]]) -> str | None:
    left_out = [
        (epoch, source, index)
        for epoch in range(fleet.syncer.state.leases.epoch)
        for source, size in enumerate(data.sizes)
        for index in range(-(-size // data.range_size))
        if (epoch, source, index) not in leased
    ]
    return f"ranges {left_out} were never leased" if left_out else None


def _uncounted(fleet: Observed, counts: list[Counter[Sample]]) -> str | None:
    num_repeated = sum(count.total() - len(count) for count in counts)
    counted = fleet.syncer.state.leases.num_repeated
    return f"{num_repeated} tokens were merged again, {counted} are counted" if num_repeated > counted else None


def _name(lease: Lease) -> Range:
    return lease.epoch, lease.source, lease.index
