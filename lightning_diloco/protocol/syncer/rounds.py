"""Opens, closes and commits the rounds of all fragments.

1. Each fragment has at most one open round. A round is announced one step ahead. Metadata decides its membership;
   payloads follow.
2. The electorate is fixed when the round opens, and only shrinks. Membership closes when the whole electorate has
   answered, or at the effective quorum plus grace. The effective quorum is max(1, min(K, electorate)). The grace window
   starts one long step (95th percentile) of the opener after the opening: on shared devices steps vary, and a median
   step would be too short for many learners.
3. A payload that misses its round is held for the next one (`contributions.py`). If a learner is superseded twice in a
   row, one round waits for it, up to a limit. A round in which it has nothing to contribute does not count.
4. Learners that finish together evaluate before they drain. A draining learner's intent waits while others evaluate,
   and its round waits for all of the electorate, both up to the learner's patience. So the last contributions are
   merged in one round instead of one after the other. The patience ends MAX_PATIENCE_S after the start of the drain,
   or after ANSWER_STEPS of its steps if that is longer.
5. The step times that a learner reports lengthen the waits of others by at most MAX_SLOWER times their own step times,
   and never beyond MAX_WAIT_S (`_believed_s`). A learner that has not answered ANSWER_STEPS steps after the wait leaves
   the electorate, whatever the quorum.
6. How far a contribution moves the anchor does not depend on the other members of its round (`shares.py`).
7. Fencing is checked twice: when a contribution is received, and when the commit is recorded.

The stages of a round and their order are the table in `round.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_low

from msgspec.structs import replace

from lightning_diloco.config import RunConfig
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.actions import SyncerAction
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.conduct import Conduct
from lightning_diloco.protocol.syncer.contributions import Contributions
from lightning_diloco.protocol.syncer.grace import Ema, grace_window_s
from lightning_diloco.protocol.syncer.ledger import Ledger
from lightning_diloco.protocol.syncer.roster import Member, Roster
from lightning_diloco.protocol.syncer.round import Counts, FragmentRounds, Held, Round
from lightning_diloco.protocol.syncer.shares import shares_of_work

TRANSFER_FACTOR = 3.0
TRANSFER_FLOOR_S = 2.0
TRANSFER_CAP_S = 120.0
OWED_AFTER = 2
WAIT_FOR_OWED_STEPS = 10
MAX_SLOWER = 4.0
MAX_WAIT_S = 600.0
MAX_PATIENCE_S = 60.0
ANSWER_STEPS, ANSWER_FLOOR_S = 10, 10.0
RETRY_COMMIT_S = 2.0
ANNOUNCE_AGAIN_S = 2.0


class Rounds:
    """Opens, closes and commits the rounds of all fragments.

    Args:
        config: options of the run.
        num_fragments: number of fragments in the plan.
        roster: sessions of the run.
        ledger: token accounts of the run.
        heartbeat_s: seconds between heartbeats, for the stall rule.
    """

    def __init__(
        self, config: RunConfig, num_fragments: int, roster: Roster, ledger: Ledger, *, heartbeat_s: float
    ) -> None:
        self.config = config
        self.roster = roster
        self.heartbeat_s = heartbeat_s
        self.generation = 0
        self.fragments = [FragmentRounds() for _ in range(num_fragments)]
        self.contributions = Contributions(self.fragments, roster, ledger, sync_every=config.sync_every)
        self.conduct = Conduct(roster, guard=config.guard)
        self.next_round = 1
        self.quorum_s = Ema()
        self.sync_s = Ema()
        self.transfer_s = Ema()
        self.counts = Counts()
        self.suspended: str | None = None

    # ----------------------------------------------------------------------------------------- messages of learners

    def intent(self, member: Member, intent: msg.Intent, now_s: float) -> list[SyncerAction]:
        p, f = intent.fragment, self.fragments[intent.fragment]
        member.heard_stepping(intent.step_s, now_s)
        if member.phase != "draining":
            intent = replace(intent, patience_s=0.0)  # the others do not wait for a learner that trains on
        elif not self.contributions.has_unmerged(member, p):
            return []  # the learner sent the intent before it knew the fate of its last tokens
        if f.round is None:
            if intent.patience_s > 0 and self._somebody_evaluates():
                f.wanted[member.session] = intent  # opened when no learner evaluates
                return []
            return self._open(f, member.session, intent, now_s)
        if f.round.stage == "collecting":
            return [do.Send(member.session, msg.Announce(p, f.round.number))]
        if member.session not in f.round.members:
            f.wanted[member.session] = intent
        return []

    def _somebody_evaluates(self) -> bool:
        return any(member.phase == "evaluating" for member in self.roster.live())

    def _open_wanted(self, p: int, f: FragmentRounds, now_s: float) -> list[SyncerAction]:
        """Open the round that draining learners asked for while others evaluated."""
        wanted = [(self.roster[session], intent) for session, intent in f.wanted.items()]
        f.wanted.clear()
        for member, intent in wanted:
            if self.contributions.has_unmerged(member, p):
                return self._open(f, member.session, intent, now_s)
        return []

    def ready(self, member: Member, ready: msg.Ready, now_s: float) -> list[SyncerAction]:
        if self._is_being_written(member, ready.fragment):
            return []  # the fate of its contribution is being written
        return self.contributions.accept(member, ready, now_s) + self._try_close(ready.fragment, now_s)

    def decline(self, member: Member, p: int, number: int, now_s: float) -> list[SyncerAction]:
        r = self.fragments[p].round
        if r is None or r.number != number or r.stage != "collecting":
            return []
        r.electorate.discard(member.session)
        r.owed -= {member.session}
        return self._try_close(p, now_s)

    def payload(self, member: Member, ready: msg.Ready, error: str | None, now_s: float) -> list[SyncerAction]:
        p, held = ready.fragment, self.fragments[ready.fragment].held
        if self._is_being_written(member, p):
            return []
        had_it = member.session in held and held[member.session].has_payload
        todo = self.contributions.receive(member, ready, error, now_s)
        if not had_it and member.session in held and held[member.session].has_payload:
            self.transfer_s.add(now_s - held[member.session].ready_s)
        return todo + self._try_close(p, now_s) + self._try_merge(p, now_s)

    def payloads_lost(self, fragments: Sequence[int], now_s: float) -> list[SyncerAction]:
        """Ask for the payloads of these fragments again; a round that needs them waits for them."""
        todo: list[SyncerAction] = []
        for p in fragments:
            f = self.fragments[p]
            for session, held in f.held.items():
                if held.has_payload:
                    held.has_payload = False
                    todo += self.tell_fate(self.roster[session], p, held.contribution.ready.seq)
            if f.round is not None and f.round.stage == "merging":
                self._transfer_again(f.round, now_s)
        return todo

    def _transfer_again(self, r: Round, now_s: float) -> None:
        r.go("transferring")
        r.until_s = now_s + self._transfer_deadline_s(r)

    def tell_fate(self, member: Member, p: int, seq: int) -> list[SyncerAction]:
        return self.contributions.tell_fate(member, p, seq)

    def remove(self, member: Member, now_s: float) -> list[SyncerAction]:
        """Stop waiting for a session that lapsed, stalled, evaluates or left."""
        todo: list[SyncerAction] = []
        for p, f in enumerate(self.fragments):
            f.wanted.pop(member.session, None)
            if f.round and member.session in f.round.electorate:
                f.round.electorate.discard(member.session)
                todo += self._try_close(p, now_s)
        return todo

    def drop_contributions(self, member: Member) -> list[SyncerAction]:
        """Drop the undecided contributions of a session that left or was fenced off."""
        return self.contributions.drop(member)

    def is_committing(self, member: Member | None = None) -> bool:
        """Return whether a commit is being written that names this session (None: any commit)."""
        writing = [f.round for f in self.fragments if f.round is not None and f.round.stage == "committing"]
        return any(member is None or member.session in r.members for r in writing)

    def _is_being_written(self, member: Member, p: int) -> bool:
        r = self.fragments[p].round
        return r is not None and r.stage == "committing" and member.session in r.members

    def announcements(self, session: str) -> list[msg.Announce]:
        """Return the open rounds that this session can still join."""
        return [
            msg.Announce(p, f.round.number)
            for p, f in enumerate(self.fragments)
            if f.round and f.round.stage == "collecting" and session not in f.held
        ]

    # ------------------------------------------------------------------------------------------------------- stages

    def _open(self, f: FragmentRounds, opener: str, intent: msg.Intent, now_s: float) -> list[SyncerAction]:
        p = intent.fragment
        f.wanted.clear()
        todo = self.contributions.supersede(p, self.config.max_staleness_versions)
        electorate = self.roster.electorate(now_s, self.heartbeat_s)
        owed = frozenset(s for s in electorate if self.roster[s].num_superseded.get(p, 0) >= OWED_AFTER)
        step_s, boundary_s = (
            self._believed_s(said_s, electorate, opener) for said_s in (intent.step_s, intent.boundary_s)
        )
        f.round = Round(self.next_round, now_s, now_s, step_s, electorate, max(1, len(electorate)), owed)
        patience_s = 0.0
        if (drained_s := self.roster[opener].drained_s) is not None:
            patience_s = min(intent.patience_s, drained_s + max(MAX_PATIENCE_S, ANSWER_STEPS * step_s) - now_s)
        f.round.until_s = now_s + max(boundary_s + self._grace_s(step_s), patience_s)
        f.round.answers_until_s = f.round.until_s + max(ANSWER_FLOOR_S, ANSWER_STEPS * step_s)
        self.next_round += 1
        # To all live learners: the round does not wait for those outside the electorate, but they may answer.
        todo += self._announce(p, f.round, {m.session for m in self.roster.live()})
        return todo + self._try_close(p, now_s)

    def _believed_s(self, said_s: float, electorate: set[str], session: str) -> float:
        """Limit a reported step time to the time that the other learners will wait (rule 5)."""
        others = [step_s for other in electorate if other != session and (step_s := self.roster[other].step_s) > 0]
        return min(said_s, MAX_SLOWER * median_low(others) if others else said_s, MAX_WAIT_S)

    def _announce(self, p: int, r: Round, sessions: set[str]) -> list[SyncerAction]:
        return [do.Send(session, msg.Announce(p, r.number)) for session in sorted(sessions)]

    def _grace_s(self, step_s: float) -> float:
        if self.config.grace != "adaptive":
            return float(self.config.grace)
        if not (self.quorum_s.is_settled and self.sync_s.is_settled):
            return step_s
        return grace_window_s(
            overlap=self.config.overlap, step_s=step_s, quorum_s=self.quorum_s.mean, sync_s=self.sync_s.mean
        )

    def effective_quorum(self, round_: Round) -> int:
        return max(1, min(self.config.quorum, len(round_.electorate)))

    def _may_join(self, held: Held) -> bool:
        """Return whether the payload is here or can come in time, and its learner is not in quarantine."""
        session = held.contribution.session
        is_here_in_time = held.has_payload or (self.roster[session].is_live and not held.is_late)
        return is_here_in_time and not self.roster.is_quarantined(session)

    def _try_close(self, p: int, now_s: float) -> list[SyncerAction]:
        f = self.fragments[p]
        r = f.round
        if r is None or r.stage != "collecting":
            return []
        is_early = now_s < min(r.until_s, r.answers_until_s)
        if is_early and r.quorum_s is not None and not r.electorate <= f.held.keys():
            return []  # the usual case, in few steps
        ready = {session for session, held in f.held.items() if self._may_join(held)}
        if now_s >= r.answers_until_s:
            r.electorate &= ready
        missing = r.electorate - ready
        has_quorum = len(ready) >= self.effective_quorum(r)
        if has_quorum and r.quorum_s is None:
            r.quorum_s = now_s
            self.quorum_s.add(now_s - r.opened_s)
        if missing and not (has_quorum and now_s >= r.until_s and now_s >= self.waits_for_owed_until_s(r, missing)):
            return []
        if not ready:
            return self._abort(p, f, "no learner had anything to contribute")
        r.go("transferring")
        r.members, r.closed_s = tuple(sorted(ready)), now_s
        r.num_ready, r.quorum = len(ready), self.effective_quorum(r)
        r.until_s = now_s + self._transfer_deadline_s(r)
        return self._try_merge(p, now_s)

    def waits_for_owed_until_s(self, r: Round, missing: set[str]) -> float:
        """Return until when a round waits for the learners that it owes a merge; its opening time if there are none."""
        times = [self._believed_s(self.roster[s].step_s, r.electorate, s) for s in r.owed & missing]
        return r.opened_s + WAIT_FOR_OWED_STEPS * max(r.opener_step_s, *times) if times else r.opened_s

    def _transfer_deadline_s(self, r: Round) -> float:
        if not r.owed.isdisjoint(r.members):
            return TRANSFER_CAP_S
        return min(TRANSFER_CAP_S, max(TRANSFER_FLOOR_S, TRANSFER_FACTOR * self.transfer_s.mean))

    def _try_merge(self, p: int, now_s: float) -> list[SyncerAction]:
        f = self.fragments[p]
        r = f.round
        if r is None or r.stage != "transferring":
            return []
        members = {s: f.held[s] for s in r.members if s in f.held}
        if now_s < r.until_s and any(not held.has_payload and self._may_join(held) for held in members.values()):
            return []
        there = {s: held for s, held in members.items() if self._may_join(held)}
        here = [s for s, held in there.items() if held.has_payload]
        for held in there.values():
            held.is_late = not held.has_payload  # it can join a later round, which does not wait for it
        if not here:
            return self._abort(p, f, "no payload arrived in time" if there else "contributors left")
        return self._merge(p, f, r, here, now_s)

    def _merge(self, p: int, f: FragmentRounds, r: Round, members: list[str], now_s: float) -> list[SyncerAction]:
        r.go("merging")
        chosen = sorted((f.held[s].contribution for s in members), key=lambda c: (c.learner, c.incarnation))
        r.members = tuple(c.session for c in chosen)
        r.shares = shares_of_work([self.roster[s] for s in r.members], self.roster.at_work(now_s, self.heartbeat_s))
        return [do.Merge(p, r.number, tuple(chosen), r.shares, self._on_trial(f))]

    def _on_trial(self, f: FragmentRounds) -> tuple[do.Contribution, ...]:
        """Return the contributions of learners in quarantine whose payload is here."""
        held = [held.contribution for s, held in f.held.items() if held.has_payload and self.roster.is_quarantined(s)]
        return tuple(sorted(held, key=lambda c: (c.learner, c.incarnation)))

    def merged(self, event: on.Merged, now_s: float) -> list[SyncerAction]:
        """Use the result of a merge: apply the verdicts, check fencing again, then commit or merge again."""
        p, f = event.fragment, self.fragments[event.fragment]
        r = f.round
        if r is None or r.number != event.round or r.stage != "merging":
            return []
        todo = [a for session, verdict in event.verdicts.items() for a in self._judge(p, f, session, verdict, now_s)]
        still_there = self._still_there(f, r)
        if not still_there:
            return todo + self._abort(p, f, "every contributor was fenced off, left or was refused")
        if len(still_there) < len(r.members):
            return todo + self._merge(p, f, r, still_there, now_s)
        r.go("committing")
        return [*todo, do.Apply(self._commit_record(p, f, r, event.kept))]

    def _judge(self, p: int, f: FragmentRounds, session: str, verdict: on.Verdict, now_s: float) -> list[SyncerAction]:
        """Apply a verdict to the contribution and to its learner."""
        held = f.held.get(session)
        if held is None:
            return []
        todo, member, was_on_trial = list[SyncerAction](), self.roster[session], self.roster.is_quarantined(session)
        record = self.conduct.hear(member, verdict)
        if record is not None:
            self.conduct.apply(record)
            event, why = (
                ("quarantine", {"reason": record.reason})
                if isinstance(record, records.Quarantined)
                else ("release", {})
            )
            todo += [do.Record(records.encode(record)), do.Note(event, {"learner": member.learner, **why})]
        if was_on_trial or self.roster.is_quarantined(session):
            reason = self.roster.quarantined.get(member.learner, "the last one in quarantine; the next is merged again")
            todo += self.contributions.decide(member, held.contribution.ready, "quarantined", reason)
            return todo + self.remove(member, now_s)
        if verdict.is_refused:
            todo += self.contributions.decide(member, held.contribution.ready, "refused", verdict.odd or "")
        return todo

    def _still_there(self, f: FragmentRounds, r: Round) -> list[str]:
        """Return the members whose contributions can still be merged."""
        return [s for s in r.members if s in f.held and self.roster[s].state == "active" and self._may_join(f.held[s])]

    def _commit_record(self, p: int, f: FragmentRounds, r: Round, kept: Mapping[str, float]) -> records.CommitRecord:
        merges = tuple(
            records.Merge(s, f.held[s].contribution.ready, share, kept.get(s, 1.0))
            for s, share in zip(r.members, r.shares, strict=True)
        )
        steps = math.fsum(merge.share * merge.kept * merge.ready.steps for merge in merges)
        return records.CommitRecord(
            fragment=p,
            generation=self.generation,
            version=f.version + 1,
            round=r.number,
            work=steps / self.config.sync_every,
            num_stepping=max(r.num_stepping, len(r.members)),
            merges=merges,
            before=f.digests.get(f.version, ""),
        )

    def committed(self, record: records.CommitRecord, digest: str, now_s: float) -> list[SyncerAction]:
        """Book a commit that is durable and installed, and offer its version to all learners."""
        p, f = record.fragment, self.fragments[record.fragment]
        r = f.round
        assert r is not None
        assert r.number == record.round
        self.suspended = None
        self.sync_s.add(now_s - r.closed_s)
        self.apply_commit(record)
        f.note_digest(f.version, digest)
        contributors = []
        for merge in record.merges:
            member = self.roster[merge.session]
            member.contributed_s = member.merged_s[p] = now_s
            contributors.append(msg.Contributor(member.learner, member.incarnation, merge.ready.seq))
        commit = msg.Commit(p, record.generation, record.version, tuple(contributors))
        todo: list[SyncerAction] = [do.DropPayload(m.session, p, m.ready.seq) for m in record.merges]
        todo.append(self._commit_note(record, r, now_s))
        todo += [do.Send(member.session, commit) for member in self.roster.in_state("active")]
        wanted = [(session, intent) for session, intent in f.wanted.items() if self.roster[session].is_live]
        self._end(p, f)
        if not wanted:
            return todo
        session, intent = wanted[0]
        return todo + self._open(f, session, replace(intent, patience_s=0.0), now_s)

    def apply_commit(self, record: records.CommitRecord) -> None:
        """Apply a commit to durable state; a restart does the same."""
        f = self.fragments[record.fragment]
        if record.before:
            f.note_digest(record.version - 1, record.before)
        f.version = record.version
        self.next_round = max(self.next_round, record.round + 1)
        self.counts.num_commits += 1
        self.counts.num_contributors += len(record.merges)
        self.counts.num_stepping += record.num_stepping
        for merge in record.merges:
            self.contributions.apply_merge(record, merge)

    def commit_failed(self, p: int, number: int, error: str, now_s: float) -> list[SyncerAction]:
        r = self.fragments[p].round
        if r is None or r.number != number:
            return []
        r.go("suspended")
        r.until_s, self.suspended = now_s + RETRY_COMMIT_S, error
        return [do.Note("suspended", {"fragment": p, "reason": error})]

    def _commit_note(self, record: records.CommitRecord, r: Round, now_s: float) -> SyncerAction:
        return do.Note(
            "commit",
            {
                "fragment": record.fragment,
                "version": record.version,
                "digest": self.fragments[record.fragment].digests[record.version],
                "round": record.round,
                "learners": [self.roster[m.session].learner for m in record.merges],
                "tokens": [m.ready.tokens for m in record.merges],
                "steps": [m.ready.steps for m in record.merges],
                "shares": [round(m.share, 6) for m in record.merges],
                "clipped": [self.roster[m.session].learner for m in record.merges if m.kept < 1],
                "staleness": [record.version - 1 - m.ready.base for m in record.merges],
                "num_stepping": record.num_stepping,
                "quorum": r.quorum,
                "quorum_s": None if r.quorum_s is None else round(r.quorum_s - r.opened_s, 6),
                "collect_s": round(r.closed_s - r.opened_s, 6),
                "round_s": round(now_s - r.opened_s, 6),
            },
        )

    def _abort(self, p: int, f: FragmentRounds, reason: str) -> list[SyncerAction]:
        assert f.round is not None
        self.counts.num_aborted += 1
        note = do.Note("abort", {"fragment": p, "round": f.round.number, "reason": reason})
        self._end(p, f)
        f.wanted.clear()
        return [note, *self._refuse_unjudged(p, f)]

    def _refuse_unjudged(self, p: int, f: FragmentRounds) -> list[SyncerAction]:
        """Refuse contributions of learners in quarantine if the round has none to compare them with."""
        todo: list[SyncerAction] = []
        for contribution in self._on_trial(f):
            member = self.roster[contribution.session]
            reason = f"{self.roster.quarantined[member.learner]}; no other learner has contributed to compare it with"
            todo += self.contributions.decide(member, contribution.ready, "quarantined", reason)
        return todo

    def _end(self, p: int, f: FragmentRounds) -> None:
        assert f.round is not None
        for session in f.round.owed:
            self.roster[session].num_superseded[p] = 0  # this round has waited for it; the count starts again
        f.round.go("over")
        f.round = None

    # ----------------------------------------------------------------------------------------------------- over time

    def tick(self, now_s: float) -> list[SyncerAction]:
        todo: list[SyncerAction] = []
        for p, f in enumerate(self.fragments):
            r = f.round
            if r is None:
                if f.wanted and not self._somebody_evaluates():
                    todo += self._open_wanted(p, f, now_s)
                continue
            if r.stage == "suspended" and now_s >= r.until_s:
                self._transfer_again(r, now_s)  # normally all payloads are here
            elif r.stage == "collecting" and now_s >= r.announced_s + ANNOUNCE_AGAIN_S:
                r.announced_s = now_s
                todo += self._announce(p, r, r.electorate - f.held.keys())
            todo += self._try_close(p, now_s) + self._try_merge(p, now_s)
        return todo
