"""The syncer's side of the protocol: everything that is decided about a run.

1. Durable state changes only by applying a record (`records.py`), live or at a restart; the record comes first.
2. Rounds live in `rounds.py`, sessions in `roster.py`, token books in `ledger.py`, join rules in `admission.py`.
   This file hands events to them and joins their answers.
3. The first step is held until the expected learners are ready, or for a minute; later joins start at once.
4. Leaves and fences wait for a commit that is being written and names the leaver; both are repeated until answered.

Source: protocol page; the paper's syncer loop (Sec. 3), with durability and fencing of our own.
"""

from __future__ import annotations

from typing import cast

from lightning_diloco.config import RunConfig
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import admission, codec, records
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.actions import SyncerAction
from lightning_diloco.protocol.codec import Json
from lightning_diloco.protocol.ledger import Ledger
from lightning_diloco.protocol.roster import Member, Roster
from lightning_diloco.protocol.rounds import Counts, Rounds

START_HOLD_S = 60.0


class SyncerState:
    """Decides who takes part, which rounds open and close, and what is committed.

    Args:
        run: run id.
        options: run options fixed by the syncer's own flags.
        expect: learners to wait for before the first step; None: do not wait.
        heartbeat_s: seconds between learners' heartbeats.
    """

    def __init__(
        self,
        *,
        run: str,
        options: dict[str, msg.Scalar] | None = None,
        expect: int | None = None,
        heartbeat_s: float = 1.0,
    ) -> None:
        self.run = run
        self.options = dict(options or {})
        self.expect = expect
        self.heartbeat_s = heartbeat_s
        self.roster = Roster()
        self.manifest: Json | None = None
        self.config = RunConfig()
        self.ledger = Ledger(0)
        self.rounds = Rounds(self.config, 0, self.roster, self.ledger, heartbeat_s=heartbeat_s)
        self.num_joins = 0
        self.num_lapses = 0
        self.num_inexact = 0
        self.eval_loss: float | None = None
        self.eval_reason: str | None = "no learner has evaluated the final anchor"
        self.has_verdict = False
        self._lease = 0
        self._seeder: str | None = None
        self._pending_manifest: Json | None = None
        self._has_started = expect is None
        self._first_confirmed_s: float | None = None
        self._contenders = admission.Contenders()
        self._applying: dict[int, records.CommitRecord] = {}

    # ------------------------------------------------------------------------------------------------------ dispatch

    def handle(self, event: on.SyncerEvent, now_s: float) -> list[SyncerAction]:
        """What is to be done because of this event."""
        match event:
            case on.FromALearner():
                return self._hear(event.session, event.message, now_s)
            case on.PayloadReceived():
                return self._payload(event, now_s)
            case on.SeedStored():
                return self._seed_stored(event, now_s)
            case on.Merged():
                return self._merged(event, now_s)
            case on.Committed():
                return self.rounds.committed(self._applying.pop(event.fragment), event.digest, now_s)
            case on.CommitFailed():
                self._applying.pop(event.fragment, None)
                return self.rounds.commit_failed(event.fragment, event.round, event.error, now_s)
            case on.Tick():
                return self._tick(now_s)

    def _hear(self, session: str, message: msg.FromLearner, now_s: float) -> list[SyncerAction]:
        member = self.roster.get(session)
        if isinstance(message, msg.Hello):
            return self._hello(session, member, message, now_s)
        if member is None:
            return []  # an unknown process; its hello was lost, and it will say it again
        todo = self._heard_from(member, now_s)
        if member.state == "fenced":
            return [*todo, self._fenced(member)]
        match message:
            case msg.SeedPlan():
                return todo + self._seed_plan(member, message)
            case msg.Confirm():
                return todo + self._confirm(member, message, now_s)
            case msg.Leave():
                return todo + self._leave(member, message, now_s)
            case msg.Evaluated():
                self.eval_loss, self.eval_reason, self.has_verdict = message.eval_loss, message.reason, True
                return [*todo, do.Note("evaluated", {"eval_loss": message.eval_loss, "reason": message.reason})]
        if member.state != "active":
            return todo
        match message:
            case msg.Heartbeat():
                return todo + self._heartbeat(member, message, now_s)
            case msg.Intent() if self._is_fragment(message.fragment):
                return todo + self.rounds.intent(member, message.fragment, message.step_s, now_s)
            case msg.Ready() if self._is_fragment(message.fragment):
                return todo + self.rounds.ready(member, message, now_s)
            case msg.Decline() if self._is_fragment(message.fragment):
                return todo + self.rounds.decline(member, message.fragment, message.round, now_s)
            case msg.AskFate() if self._is_fragment(message.fragment):
                return todo + self.rounds.tell_fate(member, message.fragment, message.seq)
        return [*todo, do.Note("ignored", {"learner": member.learner, "message": type(message).__name__})]

    def _is_fragment(self, p: int) -> bool:
        return 0 <= p < len(self.rounds.fragments)

    def _heard_from(self, member: Member, now_s: float) -> list[SyncerAction]:
        member.heard_s = now_s
        if not (member.is_lapsed and member.state == "active"):
            return []
        record = records.Returned(member.session)
        self._apply_returned(record)
        return [do.Record(records.encode(record)), do.Note("return", {"learner": member.learner})]

    def _fenced(self, member: Member) -> SyncerAction:
        text = (
            f"incarnation {member.incarnation} of learner {member.learner!r} was replaced by a newer process; "
            "this one must stop. Give each process a learner id of its own."
        )
        return do.Send(member.session, msg.Rejected("fenced", text))

    # ------------------------------------------------------------------------------------------------------- joining

    @property
    def _fixed(self) -> dict[str, object]:
        """Run options that are decided already."""
        if self.manifest is None:
            return dict(self.options)
        return cast("dict[str, object]", self.manifest["config"])

    def _hello(self, session: str, member: Member | None, hello: msg.Hello, now_s: float) -> list[SyncerAction]:
        if member is None:
            return self._newcomer(session, hello, now_s)
        if hello.connection < member.connection:
            return []
        member.connection = hello.connection
        todo = self._heard_from(member, now_s)
        if member.state == "fenced":
            return [*todo, self._fenced(member)]
        if member.state == "left":
            return [*todo, do.Send(session, msg.LeaveNoted(self._is_last()))]
        if hello.known and self._was_rolled_back(hello.known):
            todo += self._regenerate()
        todo += self._invite(member)
        announcements = [do.Send(session, a) for a in self.rounds.announcements(session)]
        return todo + (announcements if member.state == "active" else [])

    def _newcomer(self, session: str, hello: msg.Hello, now_s: float) -> list[SyncerAction]:
        if hello.known:
            text = (
                f"this process has trained in run {self.run!r}, whose syncer does not know it: the run directory is "
                "empty or belongs to another run. Restore the run directory, or start the learner anew"
            )
            return [do.Send(session, msg.Rejected("join", text))]
        if rejected := admission.objection(hello, self.run, self._fixed):
            return [do.Send(session, rejected), do.Note("rejected", {"learner": hello.learner, "text": rejected.text})]
        verdict = self._contenders.verdict(session, hello.learner, self.roster, now_s, self.heartbeat_s)
        if verdict == "wait":
            return []
        if verdict is not None:
            rejected = msg.Rejected("join", verdict)
            return [do.Send(session, rejected), do.Note("rejected", {"learner": hello.learner, "text": verdict})]
        name, roster = hello.learner, self.roster
        record = records.Granted(session, name, roster.next_incarnation(name), roster.slot_for(name))
        self._apply_granted(record)
        member = self.roster[session]
        member.connection, member.where, member.heard_s = hello.connection, hello.where, now_s
        return [do.Record(records.encode(record)), *self._invite(member)]

    def _invite(self, member: Member) -> list[SyncerAction]:
        """Tell a session what to do next: adopt, or seed, or wait."""
        if self.manifest is not None:
            versions = tuple(f.version for f in self.rounds.fragments)
            generations = (self.rounds.generation,) * len(versions)
            welcome = msg.Welcome(member.incarnation, self.run, self.manifest, generations, versions, member.slot)
            return [do.Send(member.session, welcome)]
        if self._seeder is None:
            self._seeder = member.session
            self._lease += 1
        if self._seeder != member.session:
            return []
        return [do.Send(member.session, msg.SeedGrant(self._lease, member.incarnation, self.run, self.options))]

    def _seed_plan(self, member: Member, message: msg.SeedPlan) -> list[SyncerAction]:
        if self.manifest is not None or member.session != self._seeder or message.lease != self._lease:
            return self._invite(member) if self.manifest is not None else []
        if self._pending_manifest is not None:
            return []
        config = RunConfig.from_dict(cast("dict[str, object]", message.manifest["config"]))
        if found := admission.contradictions(config.to_dict(), self.options):
            return [do.Send(member.session, msg.Rejected("config", "; ".join(found)))]
        self._pending_manifest = message.manifest
        started = do.Record(records.encode(records.Seeding(message.lease)))
        return [started, do.StoreSeed(member.session, message.lease, message.manifest)]

    def _seed_stored(self, event: on.SeedStored, now_s: float) -> list[SyncerAction]:
        if event.lease != self._lease or self._pending_manifest is None:
            return []
        manifest, self._pending_manifest = self._pending_manifest, None
        if event.error is not None:
            return [do.Note("suspended", {"reason": event.error})]
        record = records.Seeded(event.lease, manifest)
        self.apply(record)
        self.set_digests(event.digests)
        todo: list[SyncerAction] = [do.Record(records.encode(record)), do.Note("seeded", {"lease": event.lease})]
        return todo + [a for member in self.roster.in_state("joining") for a in self._invite(member)]

    def set_digests(self, digests: tuple[str, ...]) -> None:
        """Digests of the published values as they are now, per fragment."""
        for f, digest in zip(self.rounds.fragments, digests, strict=True):
            f.digests[f.version] = digest

    def _confirm(self, member: Member, confirm: msg.Confirm, now_s: float) -> list[SyncerAction]:
        if self.manifest is None or confirm.incarnation != member.incarnation:
            return []
        if member.state == "joining":
            if rejected := admission.mismatch(confirm, self.manifest):
                note = do.Note("rejected", {"learner": member.learner, "text": rejected.text})
                return [do.Send(member.session, rejected), note]
            member.state = "confirmed"
            if self._first_confirmed_s is None:
                self._first_confirmed_s = now_s
        if not self._may_start(now_s):
            return []
        waiting = [m for m in self.roster.in_state("confirmed") if m is not member]
        return [a for m in [member, *waiting] for a in self._activate(m, now_s)]

    def _may_start(self, now_s: float) -> bool:
        if not self._has_started:
            num_ready = len(self.roster.in_state("confirmed", "active", "left"))
            waited_s = now_s - (now_s if self._first_confirmed_s is None else self._first_confirmed_s)
            self._has_started = num_ready >= (self.expect or 0) or waited_s >= START_HOLD_S
        return self._has_started

    def _activate(self, member: Member, now_s: float) -> list[SyncerAction]:
        active = do.Send(member.session, msg.Active(tuple(self.rounds.announcements(member.session))))
        if member.state == "active":
            return [active]
        old = self.roster.active(member.learner)
        todo: list[SyncerAction] = []
        if old is not None:
            if self.rounds.is_committing(old):
                return []  # it is asked again
            todo += self.rounds.drop_contributions(old) + self.rounds.remove(old, now_s)
            old.ended_s = now_s
        record = records.Activated(member.session)
        self._apply_activated(record)
        member.active_s = member.stepped_s = now_s
        note = do.Note("join", {"learner": member.learner, "incarnation": member.incarnation, "where": member.where})
        return [*todo, do.Record(records.encode(record)), note, active] + ([self._fenced(old)] if old else [])

    # -------------------------------------------------------------------------------------------------- taking part

    def _heartbeat(self, member: Member, message: msg.Heartbeat, now_s: float) -> list[SyncerAction]:
        progress = message.progress
        if not len(progress.landed) == len(progress.pending) == len(self.rounds.fragments):
            return [do.Note("ignored", {"learner": member.learner, "message": "Heartbeat of a wrong length"})]
        member.hear(progress, message.phase, now_s)
        member.step_s, member.tokens_per_s, member.metrics = message.step_s, message.tokens_per_s, message.metrics
        todo: list[SyncerAction] = []
        if not self.ledger.account(member.learner, member.incarnation).declare(progress):
            self.num_inexact += 1
            todo.append(do.Note("ledger", {"learner": member.learner, "progress": codec.dump(progress)}))
        if not member.takes_part(now_s, self.heartbeat_s):
            todo += self.rounds.remove(member, now_s)
        return todo

    def _payload(self, event: on.PayloadReceived, now_s: float) -> list[SyncerAction]:
        member = self.roster.get(event.session)
        if member is None or member.state != "active" or not self._is_fragment(event.ready.fragment):
            return [do.DropPayload(event.session, event.ready.fragment, event.ready.seq)]
        return self._heard_from(member, now_s) + self.rounds.payload(member, event.ready, event.error, now_s)

    def _merged(self, event: on.Merged, now_s: float) -> list[SyncerAction]:
        todo = self.rounds.merged(event.fragment, event.round)
        for action in todo:
            if isinstance(action, do.Apply):
                self._applying[event.fragment] = cast("records.CommitRecord", records.decode(action.record))
        return todo

    def applying(self, p: int) -> records.CommitRecord:
        """The commit of this fragment that is being written."""
        return self._applying[p]

    def _was_rolled_back(self, known: tuple[msg.Mark, ...]) -> bool:
        fragments = self.rounds.fragments
        return len(known) == len(fragments) and admission.rolled_back(
            known, self.rounds.generation, [f.version for f in fragments], [f.digests for f in fragments]
        )

    def _regenerate(self) -> list[SyncerAction]:
        record = records.Regenerated(self.rounds.generation + 1)
        self.apply(record)
        todo: list[SyncerAction] = [do.Record(records.encode(record)), do.Note("regenerated", codec.dump(record))]
        for member in self.roster.in_state("active"):
            todo += self.rounds.drop_contributions(member)
            todo += [
                do.Send(member.session, msg.Commit(p, record.generation, f.version, ()))
                for p, f in enumerate(self.rounds.fragments)
            ]
        return todo

    # ------------------------------------------------------------------------------------------------------- leaving

    def _leave(self, member: Member, message: msg.Leave, now_s: float) -> list[SyncerAction]:
        if member.state == "left":
            return [do.Send(member.session, msg.LeaveNoted(self._is_last()))]
        if self.rounds.is_committing(member):
            return []  # it is repeated
        member.hear(message.progress, "draining", now_s)
        member.tokens_per_s, member.metrics, member.ended_s = message.tokens_per_s, message.metrics, now_s
        todo = self.rounds.drop_contributions(member)
        record = records.Departed(member.session, message.reason, message.progress)
        self.apply(record)
        todo += self.rounds.remove(member, now_s)
        note = do.Note(
            "leave", {"learner": member.learner, "reason": message.reason, "tokens": message.progress.tokens}
        )
        noted = do.Send(member.session, msg.LeaveNoted(self._is_last()))
        return [*todo, do.Record(records.encode(record)), note, noted]

    def _is_last(self) -> bool:
        """Whether nobody else takes part, or is about to."""
        return not self.roster.in_state("confirmed") and not any(m.is_live for m in self.roster.in_state("active"))

    def finish(self) -> None:
        """The run is over: what learners that never came back had not merged is discarded."""
        for member in self.roster.in_state("active"):
            self.ledger.account(member.learner, member.incarnation).close("lapsed")

    @property
    def is_finished(self) -> bool:
        """Whether everyone who took part left, or never came back."""
        took_part = self.roster.in_state("active", "left")
        return bool(took_part) and self._is_last()

    # ----------------------------------------------------------------------------------------------------- over time

    def _tick(self, now_s: float) -> list[SyncerAction]:
        todo: list[SyncerAction] = []
        for member in self.roster.in_state("active"):
            silent_s = now_s - member.heard_s
            if not member.is_lapsed and silent_s > self.config.lease_s:
                todo += self._lapse(member, now_s)
            elif member.is_live and member.is_stalled(now_s, self.heartbeat_s):
                todo += self.rounds.remove(member, now_s)
        todo += self._pass_on_seed_lease(now_s)
        if not self._has_started and self._may_start(now_s):
            todo += [a for m in self.roster.in_state("confirmed") for a in self._activate(m, now_s)]
        return todo + self.rounds.tick(now_s)

    def _lapse(self, member: Member, now_s: float) -> list[SyncerAction]:
        account = self.ledger.account(member.learner, member.incarnation)
        record = records.Lapsed(member.session, account.seen)
        self.apply(record)
        note = do.Note("lapse", {"learner": member.learner, "silent_s": round(now_s - member.heard_s, 3)})
        return [do.Record(records.encode(record)), note, *self.rounds.remove(member, now_s)]

    def _pass_on_seed_lease(self, now_s: float) -> list[SyncerAction]:
        seeder = self.roster.get(self._seeder) if self._seeder else None
        if self.manifest is not None or seeder is None or now_s - seeder.heard_s <= self.config.lease_s:
            return []
        others = [m for m in self.roster.in_state("joining") if now_s - m.heard_s <= self.config.lease_s]
        self._seeder = self._pending_manifest = None
        return self._invite(others[0]) if others else []

    # ---------------------------------------------------------------------------------------------- durable state

    def apply(self, record: records.LogRecord) -> None:
        """Change durable state as this record says; the only way it changes."""
        match record:
            case records.Seeding():
                self._lease = max(self._lease, record.lease)
            case records.Seeded():
                self._apply_seeded(record)
            case records.Granted():
                self._apply_granted(record)
            case records.Activated():
                self._apply_activated(record)
            case records.CommitRecord():
                self.rounds.apply_commit(record)
            case records.Decided():
                self.rounds.apply_decided(record)
            case records.Lapsed():
                self._apply_lapsed(record)
            case records.Returned():
                self._apply_returned(record)
            case records.Departed():
                self._apply_departed(record)
            case records.Regenerated():
                self.rounds.generation = record.generation

    def _apply_seeded(self, record: records.Seeded) -> None:
        self.manifest, self._lease = record.manifest, record.lease
        self.config = RunConfig.from_dict(cast("dict[str, object]", record.manifest["config"]))
        num_fragments = cast("int", record.manifest["num_fragments"])
        self.ledger = Ledger(num_fragments)
        self.rounds = Rounds(self.config, num_fragments, self.roster, self.ledger, heartbeat_s=self.heartbeat_s)

    def _apply_granted(self, record: records.Granted) -> None:
        self.roster.members[record.session] = Member(record.session, record.learner, record.incarnation, record.slot)

    def _apply_activated(self, record: records.Activated) -> None:
        member = self.roster[record.session]
        if old := self.roster.active(member.learner):
            self.ledger.account(old.learner, old.incarnation).close("lapsed")
            old.state = "fenced"
        member.state = "active"
        self.num_joins += 1
        self.ledger.account(member.learner, member.incarnation)

    def _apply_lapsed(self, record: records.Lapsed) -> None:
        member = self.roster[record.session]
        member.is_lapsed = True
        account = self.ledger.account(member.learner, member.incarnation)
        account.seen = max(account.seen, record.seen)
        self.num_lapses += 1

    def _apply_returned(self, record: records.Returned) -> None:
        self.roster[record.session].is_lapsed = False

    def _apply_departed(self, record: records.Departed) -> None:
        member = self.roster[record.session]
        account = self.ledger.account(member.learner, member.incarnation)
        if not account.declare(record.progress):
            self.num_inexact += 1
        account.close("undrained")
        member.state, member.ending, member.tokens = "left", record.reason, record.progress.tokens

    def saved(self) -> records.SavedState:
        """Everything durable, for a snapshot."""
        return records.SavedState(
            run=self.run,
            manifest=self.manifest,
            lease=self._lease,
            generation=self.rounds.generation,
            next_round=self.rounds.next_round,
            versions=tuple(f.version for f in self.rounds.fragments),
            sessions=tuple(_saved_session(m) for m in self.roster.members.values()),
            accounts=self.ledger.saved(),
            num_joins=self.num_joins,
            num_lapses=self.num_lapses,
            num_commits=self.rounds.counts.num_commits,
            num_contributors=self.rounds.counts.num_contributors,
            num_stepping=self.rounds.counts.num_stepping,
        )

    def restore(self, saved: records.SavedState, now_s: float) -> None:
        """The inverse of `saved`, on a fresh machine."""
        self.run = saved.run
        if saved.manifest is not None:
            self._apply_seeded(records.Seeded(saved.lease, saved.manifest))
        self.ledger = Ledger(len(saved.versions), saved.accounts)
        self.rounds.ledger = self.ledger
        self.rounds.generation, self.rounds.next_round = saved.generation, saved.next_round
        for f, version in zip(self.rounds.fragments, saved.versions, strict=True):
            f.version = version
        for s in saved.sessions:
            self.roster.members[s.session] = _member(s)
        self.num_joins, self.num_lapses = saved.num_joins, saved.num_lapses
        self.rounds.counts = Counts(saved.num_commits, 0, saved.num_contributors, saved.num_stepping)

    def resume(self, now_s: float) -> None:
        """Everything durable is restored: give every session a lease to report back in."""
        self._has_started = self._has_started or bool(self.roster.in_state("active", "left"))
        for member in self.roster.members.values():
            member.heard_s = member.stepped_s = now_s
            if member.state == "active":
                member.active_s = now_s if member.active_s is None else member.active_s


def _saved_session(m: Member) -> records.SavedSession:
    return records.SavedSession(
        session=m.session,
        learner=m.learner,
        incarnation=m.incarnation,
        slot=m.slot,
        state=m.state,
        ending=m.ending,
        is_lapsed=m.is_lapsed,
        last_seq={str(p): seq for p, (seq, *_) in m.fates.items()},
        fates={str(p): fate for p, fate in m.fates.items()},
    )


def _member(s: records.SavedSession) -> Member:
    member = Member(s.session, s.learner, s.incarnation, s.slot, state=s.state, is_lapsed=s.is_lapsed, ending=s.ending)
    member.last_seq = {int(p): seq for p, seq in s.last_seq.items()}
    member.fates = {int(p): fate for p, fate in s.fates.items()}
    return member
