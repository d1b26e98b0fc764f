"""The syncer's answers to learners that ask for data leases.

1. A request names all ranges that the learner holds. The answer has the leases that it did not name, and the numbers
   that are not its leases. So requests and answers may be lost or repeated. If there is nothing to lease, the answer
   says so, and the learner waits no longer.
2. Each request settles the ranges that were merged meanwhile. A learner that has read a range to its end keeps asking
   until the range is done.
3. A learner that lapses, leaves or is replaced gives back its unfinished ranges. In a new generation all learners do.
4. Learners that read other data than the run's are refused.

Source: our choice. The rules of the table are in `lease_table.py`.
"""

from __future__ import annotations

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.actions import SyncerAction
from lightning_diloco.protocol.data_ranges import Lease
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.durable_state import DurableState
from lightning_diloco.protocol.syncer.roster import Member


class Leasing(DurableState):
    """The part of the syncer that leases data."""

    def _ask_ranges(self, member: Member, asked: msg.AskRanges) -> list[SyncerAction]:
        table, session = self.leases, member.session
        if asked.generation != self.rounds.generation:
            return []  # it gets a Welcome to the current generation, and asks again
        if table.catalogue is not None and asked.catalogue != table.catalogue:
            return self._other_data(member, asked)
        todo: list[SyncerAction] = []
        if table.catalogue is None:
            todo += self._book_leases(records.Catalogued(asked.catalogue))
        for ended in table.ends(asked.begun):
            todo += self._book_leases(ended)
        table.hear(session, asked.begun)
        todo += self._settle(member)
        named = dict.fromkeys([*(span.number for span in asked.begun), *asked.unread])
        missed = {holding.lease.number for holding in table.held.of(session)} - named.keys()
        if grants := table.grants(session, named, max(0, asked.wanted - len(missed))):
            todo += self._book_leases(records.RangesLeased(session, grants, asked.drops))
            ranges = [[g.lease.epoch, g.lease.source, g.lease.index, g.lease.skip] for g in grants]
            todo.append(do.Note("leased", {"learner": member.learner, "ranges": ranges}))
        held = {holding.lease.number: holding.lease for holding in table.held.of(session)}
        leases = tuple(lease for number, lease in held.items() if number not in named)
        gone = tuple(number for number in named if number not in held)
        return [*todo, do.Send(session, msg.Leases(leases, gone))] if leases or gone or asked.wanted else todo

    def _other_data(self, member: Member, asked: msg.AskRanges) -> list[SyncerAction]:
        text = (
            f"learner {member.learner!r} reads other data than the run: {asked.catalogue}, the run has "
            f"{self.leases.catalogue}; all learners must lease the same data: the same text, tokenizer and options of "
            "TextData, or a data set of equal length with the same sampler; use the same here, or lease nothing, with "
            "TextData(leases=False) or Trainer(use_distributed_sampler=False)"
        )
        rejected = do.Send(member.session, msg.Rejected("config", text))
        return [rejected, do.Note("rejected", {"learner": member.learner, "text": text})]

    def _settle(self, member: Member, *, gives_back: bool = False) -> list[SyncerAction]:
        """Record which ranges of a member are done, and which go back to the pool."""
        record = self.leases.settled(member.session, gives_back=gives_back)
        if record is None:
            return []
        of = {
            h.lease.number: h.lease for table in (self.leases.held, self.leases.pool) for h in table.of(member.session)
        }
        named = {name: [_name(of[n]) for n in getattr(record, name)] for name in ("done", "back")}
        return [*self._book_leases(record), do.Note("settled", {"learner": member.learner, **named})]

    def _book_leases(self, record: records.LeaseRecord) -> list[SyncerAction]:
        self.apply(record)
        return [do.Record(records.encode(record))]


def _name(lease: Lease) -> list[int]:
    return [lease.epoch, lease.source, lease.index]
