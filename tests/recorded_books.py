"""Books for the check of a run's recorded files (`recorded_run.py`): sessions and leases, counted from records alone.

1. A session is one process of a learner. Its tokens are counted in each fragment (token x fragment).
2. No term is computed from the others. What was trained is a counter that the learner sent. What is merged is in
   commits. What the learner dropped is in its last report. What the syncer dropped are the pending ranges of that
   report, and the tokens after it, without those that are merged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.recorded_log import Json

Range = tuple[int, int]

# Fates of contributions, by the cause that their learner then reports for tokens.
CAUSES = {"refused": ("refused", "quarantined"), "superseded": ("superseded",), "restored": ()}


@dataclass(slots=True, eq=False)
class Session:
    """One process of a learner.

    Attributes:
        state: "granted", "active", "left" or "fenced".
        seen: highest token counter in any record.
        report: the last progress report in any record.
        merged: ranges by fragment.
        settled: by fragment, a token, and the number of merged tokens before it; from the snapshot.
        newer: (version, size) of merges by fragment, which the learner may not have landed.
        booked: tokens that the syncer discards, by cause.
        fates: by (fragment, seq), the fate of a contribution and its reason or version.
    """

    learner: str
    incarnation: int
    state: str = "granted"
    is_lapsed: bool = False
    seen: int = 0
    report: Json | None = None
    merged: defaultdict[int, list[Range]] = field(default_factory=lambda: defaultdict(list))
    settled: defaultdict[int, Range] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))
    newer: defaultdict[int, list[Range]] = field(default_factory=lambda: defaultdict(list))
    booked: Counter[str] = field(default_factory=Counter)
    fates: dict[tuple[int, int], tuple[str, Any]] = field(default_factory=dict)
    num_refused: int = 0
    num_clipped: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.learner} #{self.incarnation}"

    @property
    def where(self) -> str:
        """Its state; "live" or "lapsed" if it is active."""
        return self.state if self.state != "active" else "lapsed" if self.is_lapsed else "live"

    def begin_with(self, saved: Json, account: Json | None) -> None:
        """Continue the session and the account of a snapshot."""
        self.state = "granted" if saved["state"] == "joining" else saved["state"]
        self.is_lapsed, self.step = saved["is_lapsed"], saved["step"]
        self.num_refused, self.num_clipped = saved["num_refused"], saved["num_clipped"]
        for p, (seq, fate, version, reason, _) in saved["fates"].items():
            self.decide(int(p), seq, fate, version if fate == "merged" else reason)
        if account is not None:
            self.hear(account["seen"], account["declared"])
            self.booked.update(account["booked"])
            for p, (floor, number) in enumerate(account["settled"]):
                self.settled[p], self.merged[p] = (floor, number), [*map(tuple, account["merged"][p])]
                self.newer[p] = [(version, stop - start) for version, start, stop in account["unlanded"][p]]

    @property
    def num_merged(self) -> int:
        return sum(map(size, self.merged.values())) + sum(number for _, number in self.settled.values())

    @property
    def discarded(self) -> Counter[str]:
        return self.booked + Counter(self.report["discarded"] if self.report else {})

    def hear(self, seen: int, report: Json | None) -> None:
        self.seen, self.report = max(self.seen, seen, report["tokens"] if report else 0), report

    def decide(self, p: int, seq: int, fate: str, why: Any) -> tuple[str, Any] | None:
        """Set a fate; return another one that this contribution has already."""
        known = self.fates.setdefault((p, seq), (fate, why))
        return None if known == (fate, why) else known

    def merge(self, p: int, version: int, start: int, stop: int) -> None:
        self.merged[p] += [(start, stop)] if start < stop else []
        self.newer[p].append((version, stop - start))
        self.seen = max(self.seen, stop)

    def taken(self, p: int) -> list[Range]:
        """Return the ranges of a fragment in which nothing more can be merged."""
        return [(0, self.settled[p][0]), *self.merged[p]]

    def waiting(self, num_fragments: int) -> int:
        """Count what the last report calls pending, or came after it, and is in no commit."""
        told = self.report["pending"] if self.report else [()] * num_fragments
        last = (self.report["tokens"] if self.report else 0, self.seen)
        return sum(size(minus([*told[p], last], self.taken(p))) for p in range(num_fragments))

    def reported(self) -> dict[str, int]:
        """Return the terms of the ledger as the learner knew them at its last report."""
        assert self.report is not None
        landed, pending = self.report["landed"], sum(map(size, self.report["pending"]))
        unknown = sum(number for p, version in enumerate(landed) for v, number in self.newer[p] if v > version)
        return {"merged": self.num_merged - unknown, "pending": pending, **self.report["discarded"]}

    def without_cause(self) -> Iterator[str]:
        """Yield what it reports as discarded for causes of which the log has none."""
        fates = {fate for fate, _ in self.fates.values()}
        for cause, number in (self.report["discarded"] if self.report else {}).items():
            if number and cause in CAUSES and fates.isdisjoint(CAUSES[cause]):
                yield f"{self} reports {number} token x fragment {cause}, and nothing in the log is the cause"

    def told(self, quarantined: str | None) -> Json:
        """Return what the summary must say of it."""
        phase = {"left": "left", "lapsed": "lapsed", "fenced": "lapsed"}.get(self.where, "live")
        told = {"id": self.learner, "incarnation": self.incarnation, "phase": phase, "quarantined": quarantined}
        told |= {"num_refused": self.num_refused, "num_clipped": self.num_clipped}
        return told | ({"tokens": self.seen, "step": self.step} if phase == "left" else {})


def told_of(learner: Json) -> Json:
    """Return what the summary says of a learner, without what the log does not hold."""
    names = ["id", "incarnation", "quarantined", "num_refused", "num_clipped"]
    names += ["tokens", "step"] if learner["phase"] == "left" else []
    phase = learner["phase"] if learner["phase"] in ("left", "lapsed") else "live"
    return {"phase": phase, **{name: learner[name] for name in names}}


@dataclass(slots=True)
class Lease:
    """A lease of a range of the data.

    Attributes:
        span: samples, and their tokens [start, stop) in the holder's counter, as far as commits name them.
        merged_to: end of the last of these tokens that a commit names.
    """

    number: int
    place: tuple[int, int, int]
    holder: Session
    drops: bool
    span: tuple[int, int, int] = (0, 0, 0)
    merged_to: int = 0


class Leases:
    """All leases: held, in the pool, or done.

    Attributes:
        num_done: ranges that are done.
        repeated: ranges of a session's counter that were trained on samples of another lease.
    """

    def __init__(self) -> None:
        self.held: dict[int, Lease] = {}
        self.pool: dict[int, Lease] = {}
        self.num_done = 0
        self.repeated: defaultdict[Session, list[Range]] = defaultdict(list)
        self._next = 1
        self._leased: set[tuple[int, int, int]] = set()

    def begin_with(self, saved: Json, sessions: dict[str, Session]) -> None:
        """Continue the leases of a snapshot."""
        self.num_done, self._next = saved["num_done"], saved["next_number"]
        for session, ranges in saved["repeated"]:
            self.repeated[sessions[session]] += map(tuple, ranges)
        for name, table in (("held", self.held), ("pool", self.pool)):
            for each in saved[name]:
                number, place, span = each["lease"]["number"], _place(each["lease"]), each["span"]
                told = span["samples"], span["start"], span["stop"]
                table[number] = Lease(number, place, sessions[each["session"]], each["drops"], told)
                self._leased.add(place)

    def of(self, session: Session) -> list[int]:
        return [number for number, lease in self.held.items() if lease.holder is session]

    def lease(self, session: Session, grant: Json, drops: bool) -> Iterator[str]:
        """Apply a grant; yields what is wrong with it."""
        number, taken, place = grant["lease"]["number"], grant["taken"], _place(grant["lease"])
        former = None if taken is None else self.pool.pop(taken, None)
        if taken is not None and former is None:
            yield f"lease {number} continues lease {taken} of range {place}, which was not given back"
        if number == taken and former is not None:
            self.held[number] = former
            return
        if former is not None:
            start, stop = max(grant["lost_from"], former.span[1]), max(grant["lost_to"], former.merged_to)
            self.repeated[former.holder].append((start, stop))
        if number < self._next or (taken is None and place in self._leased):
            yield f"range {place} of the data was leased before lease {number}"
        if number >= self._next:
            self._next = number + 1
            self._leased.add(place)
            self.held[number] = Lease(number, place, session, drops)

    def follow(self, session: Session, ready: Json) -> None:
        """Apply a merge."""
        for span in ready["spans"]:
            lease = self.held.get(span["number"]) or self.pool.get(span["number"])
            if lease is None or lease.holder is not session:
                self._repeat(session, ready, span["start"], span["stop"])
                continue
            lease.span = max(lease.span, (span["samples"], span["start"], span["stop"]))
            lease.merged_to = max(lease.merged_to, min(span["stop"], ready["stop"]))
        for start, stop in ready["repeats"]:
            self._repeat(session, ready, start, stop)

    def _repeat(self, session: Session, ready: Json, start: int, stop: int) -> None:
        self.repeated[session].append((max(start, ready["start"]), min(stop, ready["stop"])))

    def settle(self, session: Session, record: Json, num_fragments: int) -> Iterator[str]:
        """Apply the end or the return of leases; yields what is wrong with it."""
        for number in record["done"]:
            lease = self.held.pop(number, None) or self.pool.pop(number, None)
            if lease is None or lease.holder is not session:
                yield f"lease {number} is done, but {session} does not have it: it was done before, or never leased"
                continue
            self.num_done += 1
            span = lease.span[1:]
            if not lease.drops and any(minus([span], session.taken(p)) for p in range(num_fragments)):
                yield f"lease {number} of range {lease.place} is done, but its tokens {span} are not merged"
        for number in record["back"]:
            if (lease := self.held.pop(number, None)) is None or lease.holder is not session:
                yield f"lease {number} is given back, but {session} does not hold it"
            else:
                self.pool[number] = lease

    def num_repeated(self, num_fragments: int) -> int:
        """Count the merged tokens that are repeated."""
        return sum(
            size([each]) - size(minus([each], session.taken(p)))
            for session, ranges in self.repeated.items()
            for each in _union(ranges)
            for p in range(num_fragments)
        )


def _place(lease: Json) -> tuple[int, int, int]:
    return lease["epoch"], lease["source"], lease["index"]


def size(ranges: Iterable[Iterable[int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def minus(ranges: Iterable[Iterable[int]], holes: Iterable[Range]) -> list[Range]:
    """Return the parts of the ranges that are in none of the holes."""
    left = [(start, stop) for start, stop in ranges if start < stop]
    for a, b in holes:
        parts = [part for start, stop in left for part in ((start, min(stop, a)), (max(start, b), stop))]
        left = [(start, stop) for start, stop in parts if start < stop]
    return left


def _union(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges without their overlaps."""
    found: list[Range] = []
    for each in ranges:
        found += minus([each], found)
    return found
