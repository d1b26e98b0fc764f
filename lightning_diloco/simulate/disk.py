"""Durable state of a simulated syncer: the log, a snapshot, and the anchors that follow from the log.

An anchor is an integer here, the sum of all pseudo-gradients merged into it. The outer learning rate is 1, there is no
momentum, and contributions are summed instead of averaged. An anchor therefore equals the number of merged tokens if no
token is lost or counted twice.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field

import msgspec

from lightning_diloco.config import CHAIN_LENGTH
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.codec import Json
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.simulate.learner import Update


@dataclass(frozen=True, slots=True)
class Entry:
    """A decoded log record and its outer gradient."""

    record: records.LogRecord
    gradient: int = 0


@dataclass(slots=True)
class Disk:
    """Log, snapshot and anchors.

    Args:
        keeps_log: keep the records; False if nothing reads them again.
        log: all records; none is ever dropped.
        snapshot: number of records it includes, and the state machine's state as JSON text.
        anchors: values by version, per fragment.
        digests: digests of the anchors by version, per fragment.
    """

    keeps_log: bool = True
    log: list[Entry] = field(default_factory=list)
    snapshot: tuple[int, str] | None = None
    anchors: list[list[int]] = field(default_factory=list)
    digests: list[list[str]] = field(default_factory=list)

    def append(self, values: Json, gradient: int = 0) -> None:
        """Make a record durable."""
        if self.keeps_log:
            values = json.loads(json.dumps(values, allow_nan=False))
        entry = Entry(records.decode(values), gradient)
        if self.keeps_log:
            self.log.append(entry)
        self._follow(entry)

    def _follow(self, entry: Entry) -> None:
        record = entry.record
        if isinstance(record, records.Seeded):
            num_fragments = record.manifest["num_fragments"]
            assert isinstance(num_fragments, int)
            self.anchors = [[0] for _ in range(num_fragments)]
            self.digests = [["start"] for _ in range(num_fragments)]
        elif isinstance(record, records.CommitRecord):
            p = record.fragment
            assert record.version == len(self.anchors[p]), "a version was left out, or committed twice"
            self.anchors[p].append(self.anchors[p][-1] + entry.gradient)
            text = b"%s %d %s" % (self.digests[p][-1].encode(), entry.gradient, msgspec.json.encode(record))
            self.digests[p].append(f"{zlib.crc32(text):08x}")

    def take_snapshot(self, state: SyncerState) -> None:
        """Save the state of the state machine."""
        self.snapshot = len(self.log), json.dumps(codec.dump(state.saved()), allow_nan=False)

    def lose(self, num_records: int) -> None:
        """Drop the newest records, and a snapshot that includes any of them, but never the seed."""
        seeds = [i for i, entry in enumerate(self.log) if isinstance(entry.record, records.Seeded)]
        keep = max(len(self.log) - num_records, seeds[0] + 1) if seeds else len(self.log)
        if self.snapshot and self.snapshot[0] > keep:
            self.snapshot = None
        entries, self.log = self.log[:keep], []
        for entry in entries:
            self.log.append(entry)
            self._follow(entry)

    def update(self, p: int, have: int | None, newest: int, sent: int) -> Update:
        """Return the update from version `have` to version `newest`: a chain of updates, or the full value."""
        values = self.anchors[p]
        if have is None or not 0 <= newest - have <= CHAIN_LENGTH:
            return Update(full=values[newest], increment=0, sent=sent)
        return Update(full=None, increment=values[newest] - values[have], sent=sent)

    def recovered(self, *, expect: int | None, now_s: float, use_snapshot: bool = False) -> SyncerState:
        """Return a state machine that is restored from disk alone.

        Args:
            expect: as for the previous state machine.
            now_s: time of the restart.
            use_snapshot: start from the snapshot, if there is one, instead of the first record.
        """
        state = SyncerState(run="simulated", expect=expect)
        first = 0
        if use_snapshot and self.snapshot is not None:
            first, text = self.snapshot
            state.restore(codec.load(records.SavedState, json.loads(text)), now_s)
        for entry in self.log[first:]:
            state.apply(entry.record)
        if state.manifest is not None:
            state.set_digests({p: digests[-1] for p, digests in enumerate(self.digests)})
        state.resume(now_s)
        return state
