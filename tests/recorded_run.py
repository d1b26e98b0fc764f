"""Checks a run from its recorded files alone: `python -m tests.recorded_run RUN_DIR`.

This shares no code with the package. It reads the frames of the redo log, after the oldest snapshot if the log was cut,
and does its own set arithmetic on ranges of tokens:

1. Each fragment's versions are 1, 2, 3, ...; a learner contributes to a version only while it takes part.
2. No token of a learner is merged twice into a fragment, and no contribution that was refused is merged.
3. A learner that has left accounts for every token: merged, discarded for a cause, or pending, in every fragment.
4. The totals of the summary are those that follow from the log.
5. Each range of leased data is finished at most once per epoch.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Range = tuple[int, int]

_FRAME = struct.Struct("<8sBxxxIQQQII")  # magic, version, header and payload bytes, lsn, durable lsn, two checksums


def records(run_dir: Path) -> tuple[Json | None, list[Json]]:
    """Return the state that the log begins with (None: nothing), and its records; a missing one is a ValueError."""
    found: list[Json] = []
    for path in sorted((run_dir / "syncer" / "log").glob("*.log")):
        found += _frames(path.read_bytes())
    first = found[0]["lsn"] if found else 1
    if [record["lsn"] for record in found] != list(range(first, first + len(found))):
        raise ValueError("the log is not whole: its numbers have a gap")
    if first == 1:
        return None, found
    before = run_dir / "syncer" / "snapshot" / f"{first - 1:020}" / "state.json"
    if not before.exists():
        raise ValueError(f"the log begins with record {first}, and there is no {before}")
    return json.loads(before.read_text())["machine"], found


def _frames(data: bytes) -> Iterator[Json]:
    at = 0
    while at < len(data):
        magic, _, header_bytes, payload_bytes, lsn, _, checksum, checksum_of_frame = _FRAME.unpack_from(data, at)
        if magic != b"DLCOredo" or zlib.crc32(data[at : at + _FRAME.size - 4]) != checksum_of_frame:
            raise ValueError(f"no record at byte {at}")
        begin, at = at + _FRAME.size, at + _FRAME.size + header_bytes + payload_bytes
        if zlib.crc32(data[begin:at]) != checksum:
            raise ValueError(f"record {lsn} is damaged")
        yield {**json.loads(data[begin : begin + header_bytes]), "lsn": lsn}


class Books:
    """One incarnation of one learner.

    Attributes:
        seen: highest known value of its token counter.
        discarded: token x fragment, as it reported them.
        merged: ranges by fragment.
        commits: (version, range) by fragment, of merges that it may not know of when it leaves.
        refused: (fragment, seq) of contributions that will not be merged.
        settled: by fragment, a token, and the number of merged tokens before it.
    """

    def __init__(self) -> None:
        self.state = "granted"
        self.seen = 0
        self.discarded: Counter[str] = Counter()
        self.merged: defaultdict[int, list[Range]] = defaultdict(list)
        self.commits: defaultdict[int, list[tuple[int, Range]]] = defaultdict(list)
        self.refused: set[tuple[int, int]] = set()
        self.settled: defaultdict[int, Range] = defaultdict(lambda: (0, 0))

    def num_merged(self) -> int:
        return sum(map(_size, self.merged.values())) + sum(number for _, number in self.settled.values())

    def hear(self, seen: int, progress: Json | None) -> None:
        self.seen = max(self.seen, seen)
        if progress is not None:
            self.seen = max(self.seen, progress["tokens"])
            self.discarded = Counter(progress["discarded"])


class Check:
    """Check of the log of a run against the rules.

    Attributes:
        problems: one sentence for each rule that is broken.
        merged, seen, discarded: totals, in token x fragment.
    """

    def __init__(self, run_dir: Path) -> None:
        self.problems: list[str] = []
        self._sessions: dict[str, tuple[str, int]] = {}
        self._books: defaultdict[tuple[str, int], Books] = defaultdict(Books)
        self._versions: Counter[int] = Counter()
        self._num_fragments = 0
        self._leased: dict[int, tuple[int, int, int]] = {}
        self._finished: set[tuple[int, int, int]] = set()
        state, log = records(run_dir)
        if state is not None:
            self._begin_with(state)
        for record in log:
            match record["kind"]:
                case "Seeded":
                    self._num_fragments = record["manifest"]["num_fragments"]
                case "Granted":
                    self._sessions[record["session"]] = record["learner"], record["incarnation"]
                case "Activated":
                    self._activated(record)
                case "CommitRecord":
                    self._commit(record)
                case "Decided":
                    self._of(record).refused.add((record["fragment"], record["seq"]))
                case "Lapsed":
                    self._of(record).hear(record["heard"]["seen"], record["heard"]["declared"])
                case "Departed":
                    self._departed(record)
                case "RangesLeased":
                    self._leased |= {grant["lease"]["number"]: _place(grant["lease"]) for grant in record["grants"]}
                case "RangesSettled":
                    self._settled(record)
        self.merged = sum(books.num_merged() for books in self._books.values())
        self.seen = self._num_fragments * sum(books.seen for books in self._books.values())
        self.discarded = sum(map(self._lost, self._books.values()))
        self._compare(json.loads((run_dir / "summary.json").read_text()))

    def _begin_with(self, state: Json) -> None:
        self._num_fragments = len(state["versions"])
        self._versions.update(dict(enumerate(state["versions"])))
        for session in state["sessions"]:
            who = self._sessions[session["session"]] = session["learner"], session["incarnation"]
            self._books[who].state = session["state"]
            refused = [(int(p), fate[0]) for p, fate in session["fates"].items() if fate[1] != "merged"]
            self._books[who].refused.update(refused)
        for account in state["accounts"]:
            books = self._books[account["learner"], account["incarnation"]]
            books.hear(account["seen"], account["declared"])
            for p, (ranges, (floor, number)) in enumerate(zip(account["merged"], account["settled"], strict=True)):
                books.merged[p] += [tuple(each) for each in ranges]
                books.settled[p] = floor, number
            for p, unlanded in enumerate(account["unlanded"]):
                books.commits[p] += [(version, (start, stop)) for version, start, stop in unlanded]
        for holding in [*state["leases"]["held"], *state["leases"]["pool"]]:
            self._leased[holding["lease"]["number"]] = _place(holding["lease"])

    # -------------------------------------------------------------------------------------------------------- records

    def _activated(self, record: Json) -> None:
        learner, incarnation = self._sessions[record["session"]]
        for (other, number), books in self._books.items():
            if other == learner and number < incarnation and books.state == "active":
                books.state = "fenced"
                if record.get("replaced") is not None:
                    books.hear(record["replaced"]["seen"], record["replaced"]["declared"])
        self._of(record).state = "active"

    def _commit(self, record: Json) -> None:
        p, version = record["fragment"], record["version"]
        if version != self._versions[p] + 1:
            self.problems.append(f"fragment {p}: version {version} follows version {self._versions[p]}")
        self._versions[p] = version
        for merge in record["merges"]:
            books, ready = self._of(merge), merge["ready"]
            who = f"{self._sessions[merge['session']]}, fragment {p}, contribution {ready['seq']}"
            start = ready["start"]
            stop = start + int((ready["stop"] - start) * merge.get("kept", 1.0))
            if books.state != "active":
                self.problems.append(f"{who}: merged, although its learner is {books.state}")
            if (p, ready["seq"]) in books.refused:
                self.problems.append(f"{who}: merged, although it was refused")
            before = [(0, books.settled[p][0]), *books.merged[p]]
            if any(start < other_stop and other_start < stop for other_start, other_stop in before):
                self.problems.append(f"{who}: tokens from {start} to {stop} were merged before")
            books.merged[p].append((start, stop))
            books.commits[p].append((version, (start, stop)))
            books.seen = max(books.seen, stop)

    def _departed(self, record: Json) -> None:
        books, progress = self._of(record), record["progress"]
        books.hear(progress["tokens"], progress)
        books.state = "left"
        # A learner may leave before it has landed a commit; it then reports as pending what has just been merged.
        pending = 0
        for p, (ranges, landed) in enumerate(zip(progress["pending"], progress["landed"], strict=True)):
            newer = [merged for version, merged in books.commits[p] if version > landed]
            pending += _size(ranges) - sum(_overlap(one, other) for one in ranges for other in newer)
        merged = books.num_merged()
        total = merged + pending + books.discarded.total()
        if total != progress["tokens"] * self._num_fragments:
            self.problems.append(
                f"{self._sessions[record['session']]} trained {progress['tokens']} tokens in {self._num_fragments} "
                f"fragments; {merged} are merged, {pending} pending, {books.discarded.total()} discarded"
            )

    def _settled(self, record: Json) -> None:
        for number in record["done"]:
            if self._leased[number] in self._finished:
                self.problems.append(f"range {self._leased[number]} of the data was finished twice")
            self._finished.add(self._leased[number])

    # ---------------------------------------------------------------------------------------------------------- totals

    def _of(self, record: Json) -> Books:
        return self._books[self._sessions[record["session"]]]

    def _lost(self, books: Books) -> int:
        """Return what is neither merged nor will be, because the run is over."""
        return self._num_fragments * books.seen - books.num_merged()

    def _compare(self, summary: Json) -> None:
        discarded = sum(summary["tokens_discarded"].values()) + summary["tokens_pending"]
        for what, said, counted in (
            ("seen", summary["tokens_seen"], self.seen),
            ("merged", summary["tokens_merged"], self.merged),
            ("not merged", discarded, self.discarded),
        ):
            if said != counted:
                self.problems.append(f"the summary says {said} token x fragment {what}, the log {counted}")
        if summary["versions"] != [self._versions[p] for p in range(self._num_fragments)]:
            self.problems.append(f"the summary says versions {summary['versions']}, the log {dict(self._versions)}")


def _place(lease: Json) -> tuple[int, int, int]:
    return lease["epoch"], lease["source"], lease["index"]


def _size(ranges: Any) -> int:
    return sum(stop - start for start, stop in ranges)


def _overlap(one: Range, other: Range) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def main() -> int:
    """Print what is wrong with a run; return 1 if anything is."""
    found = Check(Path(sys.argv[1]))
    print(*found.problems or ["nothing is wrong"], sep="\n")
    print(f"token x fragment: {found.seen} seen, {found.merged} merged, {found.discarded} not merged")
    return int(bool(found.problems))


if __name__ == "__main__":
    raise SystemExit(main())
