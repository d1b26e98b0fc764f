"""Rounds: collecting one fragment's contributions, and what becomes of each.

1. One round per fragment at a time. It is announced one step ahead, membership is decided by metadata, payloads follow.
2. The electorate is fixed at opening and only shrinks. Membership closes when everyone in it has answered, or at the
   effective quorum plus grace. Effective quorum = max(1, min(K, electorate)).
3. A payload that misses its round is held and joins the next one as what it is. Too old, it is superseded, and a
   learner superseded twice in a row is waited for, up to a cap.
4. Every contribution gets one fate. A seq already decided gets its recorded fate again.
5. What is merged is checked against the fence twice: at receipt and when the commit is recorded.

Stages: collecting -> transferring -> merging -> committing, or suspended (the disk did not take it; tried again).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_diloco.config import RunConfig
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol import records
from lightning_diloco.protocol.actions import SyncerAction
from lightning_diloco.protocol.grace import Ema, grace_window_s
from lightning_diloco.protocol.ledger import Ledger
from lightning_diloco.protocol.roster import Member, Roster

Stage = Literal["collecting", "transferring", "merging", "committing", "suspended"]

TRANSFER_FACTOR = 3.0
TRANSFER_FLOOR_S = 2.0
TRANSFER_CAP_S = 120.0
WAIT_FOR_SUPERSEDED_STEPS = 10
RETRY_COMMIT_S = 2.0
ANNOUNCE_AGAIN_S = 2.0
NUM_DIGESTS_KEPT = 8


@dataclass(slots=True)
class Held:
    """A contribution whose fate is open."""

    contribution: do.Contribution
    ready_s: float
    has_payload: bool = False


@dataclass(slots=True)
class Round:
    """One open round.

    Args:
        number: unique per fragment, growing.
        opener_step_s: the opener's time per step.
        electorate: sessions that may still answer.
        num_stepping: size of the electorate at opening.
        until_s: when the current stage ends by itself.
    """

    number: int
    opened_s: float
    announced_s: float
    opener_step_s: float
    electorate: set[str]
    num_stepping: int
    stage: Stage = "collecting"
    quorum_s: float | None = None
    closed_s: float = 0.0
    until_s: float = 0.0
    members: tuple[str, ...] = ()


@dataclass(slots=True)
class FragmentRounds:
    """What the syncer knows of one fragment."""

    version: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    round: Round | None = None
    wanted: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Counts:
    """Sums over rounds, for the summary."""

    num_commits: int = 0
    num_aborted: int = 0
    num_contributors: int = 0
    num_stepping: int = 0

    @property
    def participation(self) -> float | None:
        return self.num_contributors / self.num_stepping if self.num_stepping else None


class Rounds:
    """Opens, closes and commits the rounds of all fragments.

    Args:
        config: of the run.
        num_fragments: of the plan.
        heartbeat_s: seconds between heartbeats, for the stall rule.
        first_round: round numbers start here; after a restart, above those before it.
    """

    def __init__(
        self, config: RunConfig, num_fragments: int, roster: Roster, ledger: Ledger, *, heartbeat_s: float
    ) -> None:
        self.config = config
        self.roster = roster
        self.ledger = ledger
        self.heartbeat_s = heartbeat_s
        self.generation = 0
        self.fragments = [FragmentRounds() for _ in range(num_fragments)]
        self.next_round = 1
        self.quorum_s = Ema()
        self.sync_s = Ema()
        self.transfer_s = Ema()
        self.counts = Counts()
        self.suspended: str | None = None

    # ------------------------------------------------------------------------------------------------ what is heard

    def intent(self, member: Member, p: int, step_s: float, now_s: float) -> list[SyncerAction]:
        f = self.fragments[p]
        member.step_s, member.stepped_s, member.step = step_s, now_s, max(1, member.step)
        if f.round is None:
            return self._open(p, f, step_s, now_s)
        if f.round.stage == "collecting":
            return self._announce(p, f, f.round, {member.session} & f.round.electorate)
        if member.session not in f.round.members:
            f.wanted[member.session] = step_s
        return []

    def ready(self, member: Member, ready: msg.Ready, now_s: float) -> list[SyncerAction]:
        f = self.fragments[ready.fragment]
        if self._is_known(member, ready):
            return []
        if problem := self._problem(member, ready):
            return self._decide(member, ready, "refused", problem)
        member.last_seq[ready.fragment] = ready.seq
        f.held[member.session] = Held(do.Contribution(member.session, member.learner, member.incarnation, ready), now_s)
        return self._try_close(ready.fragment, now_s)

    def decline(self, member: Member, p: int, number: int, now_s: float) -> list[SyncerAction]:
        f = self.fragments[p]
        if f.round is None or f.round.number != number or f.round.stage != "collecting":
            return []
        f.round.electorate.discard(member.session)
        return self._try_close(p, now_s)

    def payload(self, member: Member, ready: msg.Ready, error: str | None, now_s: float) -> list[SyncerAction]:
        p, f = ready.fragment, self.fragments[ready.fragment]
        if (decided := member.fates.get(p)) and decided[0] >= ready.seq:
            return [do.DropPayload(member.session, p, ready.seq), *self.tell_fate(member, p, ready.seq)]
        todo = self.ready(member, ready, now_s)
        held = f.held.get(member.session)
        if held is None or held.contribution.ready != ready:
            return [do.DropPayload(member.session, p, ready.seq), *todo]
        if error is not None:
            return todo + self._decide(member, ready, "refused", error)
        if not held.has_payload:
            held.has_payload = True
            self.transfer_s.add(now_s - held.ready_s)
        return todo + self._try_merge(p, now_s)

    def tell_fate(self, member: Member, p: int, seq: int) -> list[SyncerAction]:
        f = self.fragments[p]
        decided = member.fates.get(p)
        held = f.held.get(member.session)
        if decided and decided[0] == seq:
            answer = msg.FateIs(p, seq, decided[1], decided[2], decided[3])
        elif held and held.contribution.ready.seq == seq and held.has_payload:
            answer = msg.FateIs(p, seq, "held")
        else:
            answer = msg.FateIs(p, seq, "unknown")
        return [do.Send(member.session, answer)]

    def remove(self, member: Member, now_s: float) -> list[SyncerAction]:
        """Nobody waits for this session any more: it lapsed, stalled, evaluates, or left."""
        todo: list[SyncerAction] = []
        for p, f in enumerate(self.fragments):
            f.wanted.pop(member.session, None)
            if f.round and member.session in f.round.electorate:
                f.round.electorate.discard(member.session)
                todo += self._try_close(p, now_s)
        return todo

    def drop_contributions(self, member: Member) -> list[SyncerAction]:
        """Forget what is undecided of a session that left or was fenced off."""
        todo: list[SyncerAction] = []
        for p, f in enumerate(self.fragments):
            if held := f.held.pop(member.session, None):
                todo.append(do.DropPayload(member.session, p, held.contribution.ready.seq))
        return todo

    def is_committing(self, member: Member) -> bool:
        """Whether a commit that names this session is being written right now."""
        return any(
            f.round is not None and f.round.stage == "committing" and member.session in f.round.members
            for f in self.fragments
        )

    def announcements(self, session: str) -> list[msg.Announce]:
        """Open rounds that wait for this session."""
        return [
            msg.Announce(p, f.round.number)
            for p, f in enumerate(self.fragments)
            if f.round and f.round.stage == "collecting" and session in f.round.electorate - f.held.keys()
        ]

    # ------------------------------------------------------------------------------------------------- contributions

    def _is_known(self, member: Member, ready: msg.Ready) -> bool:
        held = self.fragments[ready.fragment].held.get(member.session)
        decided = member.fates.get(ready.fragment)
        return (held is not None and held.contribution.ready == ready) or (
            decided is not None and decided[0] >= ready.seq
        )

    def _problem(self, member: Member, ready: msg.Ready) -> str | None:
        """What speaks against accepting this description, if anything."""
        f = self.fragments[ready.fragment]
        account = self.ledger.account(member.learner, member.incarnation)
        if member.session in f.held:
            return f"seq {ready.seq} came while seq {f.held[member.session].contribution.ready.seq} is undecided"
        if ready.generation != self.generation:
            return f"generation {ready.generation}, the run is at {self.generation}"
        if not 0 <= ready.base <= f.version:
            return f"base version {ready.base}, the newest is {f.version}"
        if ready.seq <= member.last_seq.get(ready.fragment, 0):
            return f"seq {ready.seq} is not above {member.last_seq[ready.fragment]}"
        if not 0 <= ready.start < ready.stop or ready.steps < 1:
            return f"range [{ready.start}, {ready.stop}) over {ready.steps} steps; both must be positive"
        if overlap := account.merged[ready.fragment].overlap(ready.start, ready.stop):
            return f"{overlap} tokens of [{ready.start}, {ready.stop}) were merged before"
        return None

    def _decide(
        self, member: Member, ready: msg.Ready, fate: Literal["refused", "superseded"], reason: str
    ) -> list[SyncerAction]:
        record = records.Decided(member.session, ready.fragment, ready.seq, fate, reason)
        self.apply_decided(record)
        return [
            do.Record(records.encode(record)),
            do.DropPayload(member.session, ready.fragment, ready.seq),
            do.Note(fate, {"learner": member.learner, "fragment": ready.fragment, "seq": ready.seq, "reason": reason}),
            *self.tell_fate(member, ready.fragment, ready.seq),
        ]

    def apply_decided(self, record: records.Decided) -> None:
        member, f = self.roster[record.session], self.fragments[record.fragment]
        member.fates[record.fragment] = (record.seq, record.fate, None, record.reason)
        member.last_seq[record.fragment] = max(record.seq, member.last_seq.get(record.fragment, 0))
        if record.fate == "superseded":
            member.num_superseded[record.fragment] = member.num_superseded.get(record.fragment, 0) + 1
        held = f.held.get(record.session)
        if held and held.contribution.ready.seq == record.seq:
            del f.held[record.session]

    # -------------------------------------------------------------------------------------------------------- stages

    def _open(self, p: int, f: FragmentRounds, step_s: float, now_s: float) -> list[SyncerAction]:
        electorate = self.roster.electorate(now_s, self.heartbeat_s)
        f.wanted.clear()
        todo = self._supersede_stale(p, f)
        f.round = Round(self.next_round, now_s, now_s, step_s, electorate, max(1, len(electorate)))
        f.round.until_s = now_s + step_s + self._grace_s(step_s)
        self.next_round += 1
        return todo + self._announce(p, f, f.round, electorate) + self._try_close(p, now_s)

    def _announce(self, p: int, f: FragmentRounds, r: Round, sessions: set[str]) -> list[SyncerAction]:
        return [do.Send(session, msg.Announce(p, r.number)) for session in sorted(sessions - f.held.keys())]

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

    def _supersede_stale(self, p: int, f: FragmentRounds) -> list[SyncerAction]:
        stale = [
            h for h in f.held.values() if f.version - h.contribution.ready.base > self.config.max_staleness_versions
        ]
        return [
            action
            for held in stale
            for action in self._decide(
                self.roster[held.contribution.session],
                held.contribution.ready,
                "superseded",
                f"base version {held.contribution.ready.base} of fragment {p}, the newest is {f.version}",
            )
        ]

    def _may_join(self, held: Held) -> bool:
        """Its payload is here, or somebody is there to send it."""
        return held.has_payload or self.roster[held.contribution.session].is_live

    def _try_close(self, p: int, now_s: float) -> list[SyncerAction]:
        f = self.fragments[p]
        r = f.round
        if r is None or r.stage != "collecting":
            return []
        ready = {session for session, held in f.held.items() if self._may_join(held)}
        missing = r.electorate - ready
        if r.quorum_s is None and len(ready) >= self.effective_quorum(r):
            r.quorum_s = now_s
            self.quorum_s.add(now_s - r.opened_s)
        owed = [s for s in missing if self.roster[s].num_superseded.get(p, 0) >= 2]
        if owed and now_s < r.opened_s + WAIT_FOR_SUPERSEDED_STEPS * max(r.opener_step_s, self.roster[owed[0]].step_s):
            return []
        if missing and (r.quorum_s is None or now_s < r.until_s):
            return []
        if not ready:
            return self._abort(p, f, "nobody had anything to contribute")
        r.stage, r.members, r.closed_s = "transferring", tuple(sorted(ready)), now_s
        r.until_s = now_s + self._transfer_deadline_s(p, r)
        return self._try_merge(p, now_s)

    def _transfer_deadline_s(self, p: int, r: Round) -> float:
        if any(self.roster[s].num_superseded.get(p, 0) >= 2 for s in r.members):
            return TRANSFER_CAP_S
        return min(TRANSFER_CAP_S, max(TRANSFER_FLOOR_S, TRANSFER_FACTOR * self.transfer_s.mean))

    def _try_merge(self, p: int, now_s: float) -> list[SyncerAction]:
        f = self.fragments[p]
        r = f.round
        if r is None or r.stage != "transferring":
            return []
        here = [s for s in r.members if s in f.held and f.held[s].has_payload]
        awaited = [s for s in r.members if s in f.held and not f.held[s].has_payload and self.roster[s].is_live]
        if awaited and now_s < r.until_s:
            return []
        if not here:
            return self._abort(p, f, "no payload arrived in time")
        r.members = tuple(here)
        return self._merge(p, f, r)

    def _merge(self, p: int, f: FragmentRounds, r: Round) -> list[SyncerAction]:
        r.stage = "merging"
        chosen = sorted((f.held[s].contribution for s in r.members), key=lambda c: (c.learner, c.incarnation))
        return [do.Merge(p, r.number, tuple(chosen))]

    def merged(self, p: int, number: int) -> list[SyncerAction]:
        """The outer gradient exists; check the fence once more, then have it committed."""
        f = self.fragments[p]
        r = f.round
        if r is None or r.number != number or r.stage != "merging":
            return []
        still_there = tuple(s for s in r.members if s in f.held and self.roster[s].state == "active")
        if not still_there:
            return self._abort(p, f, "every contributor was fenced off or left")
        if still_there != r.members:
            r.members = still_there
            return self._merge(p, f, r)
        r.stage = "committing"
        readies = [f.held[s].contribution.ready for s in r.members]
        weights = [ready.tokens * ready.tokens / ready.steps for ready in readies]
        steps = sum(w * ready.steps for w, ready in zip(weights, readies, strict=True)) / sum(weights)
        record = records.CommitRecord(
            fragment=p,
            generation=self.generation,
            version=f.version + 1,
            round=r.number,
            steps=steps,
            num_stepping=max(r.num_stepping, len(r.members)),
            merges=tuple(records.Merge(s, ready) for s, ready in zip(r.members, readies, strict=True)),
        )
        return [do.Apply(p, r.number, records.encode(record), steps)]

    def committed(self, record: records.CommitRecord, digest: str, now_s: float) -> list[SyncerAction]:
        """The commit is durable and applied: offer it to everyone."""
        f = self.fragments[record.fragment]
        r = f.round
        assert r is not None and r.number == record.round
        self.suspended = None
        self.sync_s.add(now_s - r.closed_s)
        self.apply_commit(record)
        f.digests[f.version] = digest
        f.digests.pop(f.version - NUM_DIGESTS_KEPT, None)
        members = [self.roster[merge.session] for merge in record.merges]
        for member in members:
            member.contributed_s = now_s
        commit = msg.Commit(
            record.fragment,
            record.generation,
            record.version,
            tuple(
                msg.Contributor(member.learner, member.incarnation, merge.ready.seq)
                for member, merge in zip(members, record.merges, strict=True)
            ),
        )
        todo: list[SyncerAction] = [do.DropPayload(m.session, record.fragment, m.ready.seq) for m in record.merges]
        todo.append(self._commit_note(record, r, now_s))
        todo += [do.Send(member.session, commit) for member in self.roster.in_state("active")]
        return todo + self._end_round(record.fragment, f, now_s)

    def apply_commit(self, record: records.CommitRecord) -> None:
        """The part of a commit that a restart repeats."""
        f = self.fragments[record.fragment]
        f.version = record.version
        self.next_round = max(self.next_round, record.round + 1)
        self.counts.num_commits += 1
        self.counts.num_contributors += len(record.merges)
        self.counts.num_stepping += record.num_stepping
        for merge in record.merges:
            member, ready = self.roster[merge.session], merge.ready
            account = self.ledger.account(member.learner, member.incarnation)
            account.merge(record.fragment, record.version, ready.start, ready.stop)
            member.fates[record.fragment] = (ready.seq, "merged", record.version, None)
            member.last_seq[record.fragment] = max(ready.seq, member.last_seq.get(record.fragment, 0))
            member.num_superseded[record.fragment] = 0
            f.held.pop(merge.session, None)

    def commit_failed(self, p: int, number: int, error: str, now_s: float) -> list[SyncerAction]:
        f = self.fragments[p]
        if f.round is None or f.round.number != number:
            return []
        f.round.stage, f.round.until_s = "suspended", now_s + RETRY_COMMIT_S
        self.suspended = error
        return [do.Note("suspended", {"fragment": p, "reason": error})]

    def _commit_note(self, record: records.CommitRecord, r: Round, now_s: float) -> SyncerAction:
        learners = [self.roster[m.session].learner for m in record.merges]
        return do.Note(
            "commit",
            {
                "fragment": record.fragment,
                "version": record.version,
                "round": record.round,
                "learners": learners,
                "tokens": [m.ready.tokens for m in record.merges],
                "steps": [m.ready.steps for m in record.merges],
                "staleness": [record.version - 1 - m.ready.base for m in record.merges],
                "num_stepping": record.num_stepping,
                "quorum_s": None if r.quorum_s is None else round(r.quorum_s - r.opened_s, 6),
                "collect_s": round(r.closed_s - r.opened_s, 6),
                "round_s": round(now_s - r.opened_s, 6),
            },
        )

    def _abort(self, p: int, f: FragmentRounds, reason: str) -> list[SyncerAction]:
        assert f.round is not None
        self.counts.num_aborted += 1
        note = do.Note("abort", {"fragment": p, "round": f.round.number, "reason": reason})
        f.round = None
        f.wanted.clear()
        return [note]

    def _end_round(self, p: int, f: FragmentRounds, now_s: float) -> list[SyncerAction]:
        f.round = None
        wanted = [step_s for session, step_s in f.wanted.items() if self.roster[session].is_live]
        return self._open(p, f, wanted[0], now_s) if wanted else []

    # ----------------------------------------------------------------------------------------------------- over time

    def tick(self, now_s: float) -> list[SyncerAction]:
        todo: list[SyncerAction] = []
        for p, f in enumerate(self.fragments):
            if f.round is None:
                continue
            if f.round.stage == "suspended" and now_s >= f.round.until_s:
                f.round.members = tuple(s for s in f.round.members if s in f.held)
                todo += self._merge(p, f, f.round) if f.round.members else self._abort(p, f, "contributors left")
            if f.round.stage == "collecting" and now_s >= f.round.announced_s + ANNOUNCE_AGAIN_S:
                f.round.announced_s = now_s
                todo += self._announce(p, f, f.round, f.round.electorate)
            todo += self._try_close(p, now_s) + self._try_merge(p, now_s)
        return todo
