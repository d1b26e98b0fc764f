"""Token accounts: the fate of each token, per (learner, incarnation, fragment).

1. The unit is token x fragment: a batch of n tokens counts n in each fragment.
2. `seen` comes from the learners' counters, `merged` from commit records, `discarded` from causes booked by learners
   and syncer, `pending` from the ranges that learners report as unsent. No term is computed from the others, so
   seen = merged + discarded + pending is a real check.
3. A range is merged once; merging it twice raises.
4. With a landing rule that drops tokens, merged ranges never touch, and their number grows. Ranges that lie before all
   open ones are replaced by their total size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lightning_diloco.protocol.codec import Value
from lightning_diloco.protocol.intervals import IntervalSet
from lightning_diloco.protocol.limits import Count
from lightning_diloco.protocol.messages import Progress

MAX_RANGES = 256


class Heard(Value, frozen=True):
    """A learner's token counter and progress report, as last received."""

    seen: Count
    declared: Progress | None


@dataclass(slots=True)
class Account:
    """The account of one incarnation of one learner.

    Args:
        learner, incarnation: owner of the account.
        merged: per fragment, the merged ranges.
        unlanded: per fragment, (version, start, stop) of merges that the learner may not have landed yet.
        seen: highest token counter received.
        declared: the learner's progress report, as last received.
        booked: token x fragment discarded by the syncer, by cause.
        is_absent: the learner has lapsed; its pending tokens wait for its return.
        is_closed: no more tokens can be merged or pending.
        is_exact: the last progress report agreed with the commits.
        is_long: a fragment may have more than MAX_RANGES merged ranges.
    """

    learner: str
    incarnation: int
    merged: list[IntervalSet]
    unlanded: list[list[tuple[int, int, int]]]
    seen: int = 0
    declared: Progress | None = None
    booked: Counter[str] = field(default_factory=Counter)
    is_absent: bool = False
    is_closed: bool = False
    is_exact: bool = field(default=False, compare=False)
    is_long: bool = field(default=True, compare=False)

    @property
    def num_merged(self) -> int:
        return sum(ranges.size for ranges in self.merged)

    @property
    def num_discarded(self) -> Counter[str]:
        return self.booked + Counter(self.declared.discarded if self.declared else {})

    @property
    def may_have_lost(self) -> bool:
        """Whether some tokens may be neither merged nor pending."""
        return not self.is_exact or bool(self.booked) or bool(self.declared and self.declared.discarded)

    @property
    def num_pending(self) -> int:
        """Tokens that the learner reported as pending, without those merged since."""
        if self.is_closed:
            return 0
        return sum(stop - start for p in range(len(self.merged)) for start, stop in self.unmerged(p))

    def unmerged(self, fragment: int) -> list[tuple[int, int]]:
        """Return the ranges of a fragment that are reported as pending, or seen since, and not merged."""
        declared = self.declared.pending[fragment] if self.declared else ()
        known = self.declared.tokens if self.declared else 0
        ranges = [*declared, (known, self.seen)] if self.seen > known else declared
        return [gap for start, stop in ranges for gap in self.merged[fragment].missing(start, stop)]

    def declare(self, progress: Progress) -> bool:
        """Process a learner's progress report; returns whether it agrees with the commits that the learner has landed.

        A report that is older than the last one is ignored, because messages may overtake each other.
        """
        if self.declared and _age(progress) < _age(self.declared):
            return True
        self.seen = max(self.seen, progress.tokens)
        self.declared = progress
        landed_size = sum([merged.size for merged in self.merged])
        for p, entries in enumerate(self.unlanded):
            if entries:
                self.unlanded[p] = [entry for entry in entries if entry[0] > progress.landed[p]]
                landed_size -= sum([stop - start for _, start, stop in self.unlanded[p]])
        pending = sum([stop - start for ranges in progress.pending for start, stop in ranges])
        total = landed_size + sum(progress.discarded.values()) + pending
        self.is_exact = total == progress.tokens * len(self.merged)
        return self.is_exact

    def settle(self) -> None:
        """Replace merged ranges before all open ones by their size, if a fragment has more than MAX_RANGES (rule 4)."""
        if self.declared is None or not self.is_long:
            return
        for merged, unlanded, pending in zip(self.merged, self.unlanded, self.declared.pending, strict=True):
            if len(merged) > MAX_RANGES:
                open_from = [start for start, _ in pending] + [start for _, start, _ in unlanded]
                merged.settle(min([self.declared.tokens, *open_from]))
        self.is_long = any(len(merged) > MAX_RANGES for merged in self.merged)

    def merge(self, fragment: int, version: int, start: int, stop: int) -> None:
        """Book a merged range; raises ValueError if a part of it was merged before."""
        self.merged[fragment].add(start, stop)
        self.is_long |= len(self.merged[fragment]) > MAX_RANGES
        self.unlanded[fragment].append((version, start, stop))
        self.seen = max(self.seen, stop)

    def heard(self) -> Heard:
        """Return the learner's reports, for a record: a restart cannot compute them from the commits."""
        return Heard(self.seen, self.declared)

    def hear(self, heard: Heard) -> None:
        """Restore the reports that `heard` returned; a commit that was being written then may have merged more."""
        self.seen = max([heard.seen, *(ranges.end for ranges in self.merged)])
        self.declared = heard.declared

    def close(self, cause: str) -> None:
        """Book all pending tokens as discarded with this cause, and close the account."""
        if not self.is_closed:
            self.booked[cause] += self.num_pending
            self.is_closed = True


def _age(progress: Progress) -> tuple[int, int, int]:
    """Return a key that grows with each relevant change of a learner's progress."""
    return progress.tokens, sum(progress.discarded.values()), sum(progress.landed)


@dataclass(slots=True)
class Totals:
    """Sums over accounts, in token x fragment; `absent` is the part of `pending` whose learner has lapsed."""

    seen: int = 0
    merged: int = 0
    pending: int = 0
    absent: int = 0
    discarded: Counter[str] = field(default_factory=Counter)

    @property
    def is_exact(self) -> bool:
        return self.seen == self.merged + self.pending + sum(self.discarded.values())


class SavedAccount(Value, frozen=True):
    """An account as plain values, for snapshots."""

    learner: str
    incarnation: Count
    merged: tuple[tuple[tuple[Count, Count], ...], ...]
    unlanded: tuple[tuple[tuple[Count, Count, Count], ...], ...]
    seen: Count
    declared: Progress | None
    booked: dict[str, Count]
    is_absent: bool
    is_closed: bool
    settled: tuple[tuple[Count, Count], ...] = ()


class Ledger:
    """All accounts of a run."""

    def __init__(self, num_fragments: int, saved: tuple[SavedAccount, ...] = ()) -> None:
        self.num_fragments = num_fragments
        self.accounts: dict[tuple[str, int], Account] = {
            (a.learner, a.incarnation): Account(
                learner=a.learner,
                incarnation=a.incarnation,
                merged=[
                    IntervalSet(ranges, floor=floor, num_settled=number)
                    for ranges, (floor, number) in zip(a.merged, a.settled or ((0, 0),) * len(a.merged), strict=True)
                ],
                unlanded=[list(entries) for entries in a.unlanded],
                seen=a.seen,
                declared=a.declared,
                booked=Counter(a.booked),
                is_absent=a.is_absent,
                is_closed=a.is_closed,
            )
            for a in saved
        }

    def account(self, learner: str, incarnation: int) -> Account:
        """Return the account of an incarnation; opens it at first use."""
        key = (learner, incarnation)
        if key not in self.accounts:
            num = range(self.num_fragments)
            self.accounts[key] = Account(learner, incarnation, [IntervalSet() for _ in num], [[] for _ in num])
        return self.accounts[key]

    @property
    def seen(self) -> int:
        """Tokens seen by all learners; a batch of n tokens counts n."""
        return sum([account.seen for account in self.accounts.values()])

    @property
    def num_merged(self) -> int:
        """Merged tokens, in token x fragment."""
        return sum(account.num_merged for account in self.accounts.values())

    def seen_by_others(self, account: Account) -> int:
        """Return the tokens seen by all learners but this one."""
        return self.seen - account.seen

    def totals(self) -> Totals:
        """Return the sums over all accounts."""
        totals = Totals()
        for account in self.accounts.values():
            totals.seen += account.seen * self.num_fragments
            totals.merged += account.num_merged
            pending = account.num_pending
            totals.pending += pending
            totals.absent += pending if account.is_absent else 0
            totals.discarded += account.num_discarded
        return totals

    def saved(self) -> tuple[SavedAccount, ...]:
        """Return the ledger as plain values, for snapshots; the constructor takes them."""
        return tuple(
            SavedAccount(
                learner=a.learner,
                incarnation=a.incarnation,
                merged=tuple(tuple(ranges) for ranges in a.merged),
                unlanded=tuple(tuple(entries) for entries in a.unlanded),
                seen=a.seen,
                declared=a.declared,
                booked=dict(a.booked),
                is_absent=a.is_absent,
                is_closed=a.is_closed,
                settled=tuple((ranges.floor, ranges.num_settled) for ranges in a.merged),
            )
            for a in self.accounts.values()
        )
