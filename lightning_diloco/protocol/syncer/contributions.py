"""Checks contributions at the syncer and records the fate of each.

1. Fencing, seq, base version and range are checked before a contribution is held. If a check fails, it is refused.
2. A seq that was decided before gets its recorded fate again. A fate is recorded before it is sent.
3. A contribution that is too old is superseded. Only a commit makes it merged.
"""

from __future__ import annotations

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import limits
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.actions import SyncerAction
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.claims import implausible_tokens, plausible_steps
from lightning_diloco.protocol.syncer.ledger import Ledger
from lightning_diloco.protocol.syncer.roster import Member, Roster
from lightning_diloco.protocol.syncer.round import FragmentRounds, Held


class Contributions:
    """All contributions of a run.

    Args:
        fragments: state of the fragments, which holds undecided contributions.
        roster: sessions of the run.
        ledger: token accounts of the run.
        sync_every: H of the run, in steps.
    """

    def __init__(self, fragments: list[FragmentRounds], roster: Roster, ledger: Ledger, *, sync_every: int) -> None:
        self._fragments = fragments
        self._roster = roster
        self._ledger = ledger
        self._sync_every = sync_every

    def accept(self, member: Member, ready: msg.Ready, now_s: float) -> list[SyncerAction]:
        """Hold a contribution, or refuse it with a reason."""
        p, f = ready.fragment, self._fragments[ready.fragment]
        decided, held = member.fates.get(p), f.held.get(member.session)
        if decided is not None and ready.seq <= decided[0]:
            return self.tell_fate(member, p, ready.seq)
        if held is not None and held.contribution.ready == ready:
            return []
        if problem := self._problem(member, ready):
            return self.decide(member, ready, "refused", problem)
        member.last_seq[p] = ready.seq
        steps = plausible_steps(member, ready, self._roster, now_s=now_s, sync_every=self._sync_every)
        contribution = do.Contribution(member.session, member.learner, member.incarnation, ready, steps)
        f.held[member.session] = Held(contribution, now_s)
        return []

    def receive(self, member: Member, ready: msg.Ready, error: str | None, now_s: float) -> list[SyncerAction]:
        """Process the arrival of a payload; `error` describes what is wrong with its values, if anything."""
        p, f = ready.fragment, self._fragments[ready.fragment]
        todo = self.accept(member, ready, now_s)
        held = f.held.get(member.session)
        if held is None or held.contribution.ready != ready:
            return [do.DropPayload(member.session, p, ready.seq), *todo]
        if error is not None:
            return todo + self.decide(member, ready, "refused", error)
        held.has_payload = True
        return todo

    def tell_fate(self, member: Member, p: int, seq: int) -> list[SyncerAction]:
        """Send the fate of a contribution; "unknown" asks the learner to upload it again."""
        decided, held = member.fates.get(p), self._fragments[p].held.get(member.session)
        if decided and decided[0] == seq:
            answer = msg.FateIs(p, seq, decided[1], decided[2], decided[3])
        elif held and held.contribution.ready.seq == seq and held.has_payload:
            answer = msg.FateIs(p, seq, "held")
        else:
            answer = msg.FateIs(p, seq, "unknown")
        return [do.Send(member.session, answer)]

    def drop(self, member: Member) -> list[SyncerAction]:
        """Drop the undecided contributions of a session that left or was fenced off."""
        todo: list[SyncerAction] = []
        for p, f in enumerate(self._fragments):
            if held := f.held.pop(member.session, None):
                todo.append(do.DropPayload(member.session, p, held.contribution.ready.seq))
        return todo

    def has_unmerged(self, member: Member, p: int) -> bool:
        """Return whether the session has reported tokens of this fragment that are in no commit."""
        return bool(self._ledger.account(member.learner, member.incarnation).unmerged(p))

    def supersede(self, p: int, max_staleness_versions: int) -> list[SyncerAction]:
        """Supersede the contributions that are too old for the round that opens."""
        f = self._fragments[p]
        todo: list[SyncerAction] = []
        for held in list(f.held.values()):
            ready = held.contribution.ready
            if f.version - ready.base > max_staleness_versions:
                member = self._roster[held.contribution.session]
                member.num_superseded[p] = member.num_superseded.get(p, 0) + 1
                text = f"base version {ready.base} of fragment {p}, the newest is {f.version}"
                todo += self.decide(member, ready, "superseded", text)
        return todo

    def _problem(self, member: Member, ready: msg.Ready) -> str | None:
        """Return why a contribution must be refused; None if it can be accepted."""
        f = self._fragments[ready.fragment]
        account = self._ledger.account(member.learner, member.incarnation)
        if member.session in f.held:
            return f"seq {ready.seq} came while seq {f.held[member.session].contribution.ready.seq} is undecided"
        if not 0 <= ready.base <= f.version:
            return f"base version {ready.base}, the newest is {f.version}"
        if ready.seq <= member.last_seq.get(ready.fragment, 0):
            return f"seq {ready.seq} is not above {member.last_seq.get(ready.fragment, 0)}"
        if not 0 <= ready.start < ready.stop or ready.steps < 1:
            return f"range [{ready.start}, {ready.stop}) over {ready.steps} steps; both must be positive"
        if problem := implausible_tokens(member, self._roster, tokens=ready.tokens, steps=ready.steps):
            return problem
        if overlap := account.merged[ready.fragment].overlap(ready.start, ready.stop):
            return f"{overlap} tokens of [{ready.start}, {ready.stop}) were merged before"
        return None

    def decide(self, member: Member, ready: msg.Ready, fate: msg.Unmerged, reason: str) -> list[SyncerAction]:
        """Record a fate, then send it."""
        record = records.Decided(member.session, ready.fragment, ready.seq, fate, reason[: limits.MAX_CHARS])
        self.apply_decided(record)
        return [
            do.Record(records.encode(record)),
            do.DropPayload(member.session, ready.fragment, ready.seq),
            do.Note(fate, {"learner": member.learner, "fragment": ready.fragment, "seq": ready.seq, "reason": reason}),
            *self.tell_fate(member, ready.fragment, ready.seq),
        ]

    def apply_decided(self, record: records.Decided) -> None:
        """Apply a fate to durable state; a restart does the same."""
        member, f = self._roster[record.session], self._fragments[record.fragment]
        is_new = record.seq != member.fates.get(record.fragment, (None,))[0]
        member.num_refused += is_new and record.fate in ("refused", "quarantined")
        member.fates[record.fragment] = (record.seq, record.fate, None, record.reason, 1.0)
        member.last_seq[record.fragment] = max(record.seq, member.last_seq.get(record.fragment, 0))
        held = f.held.get(record.session)
        if held and held.contribution.ready.seq == record.seq:
            del f.held[record.session]

    def apply_merge(self, record: records.CommitRecord, merge: records.Merge) -> None:
        """Apply a commit to one of its contributions."""
        p, member, ready = record.fragment, self._roster[merge.session], merge.ready
        self._ledger.account(member.learner, member.incarnation).merge(p, record.version, ready.start, merge.stop)
        member.fates[p] = (ready.seq, "merged", record.version, None, merge.kept)
        member.last_seq[p] = max(ready.seq, member.last_seq.get(p, 0))
        member.num_superseded[p] = 0
        member.num_clipped += merge.kept < 1
        self._fragments[p].held.pop(merge.session, None)
