"""The syncer's state machine: all decisions about a run.

1. Durable state (`durable_state.py`) changes only by applying a record, live or at a restart. Messages about a change
   follow its record.
2. Joins are handled in `joins.py`, data leases in `leasing.py`, rounds in `rounds.py`, contributions in
   `contributions.py`, token accounts in `ledger.py`. This file dispatches events to them and collects their actions.
3. While a commit that names a session is being written, this session cannot leave or be fenced off. The messages that
   ask for it are repeated until they are answered.
4. If a learner names another generation, or a version above the syncer's, the answer is a Welcome to the current
   generation. If the learner proves that the version was published (`proofs.py`), the syncer's disk was rolled back,
   and a new generation begins.
5. Leases are measured from the arrival of events, not from their handling. Time in which this process was suspended
   does not count.

Source: the paper's syncer loop (arXiv 2604.21428, Sec. 3); durability and fencing are our choice.
"""

from __future__ import annotations

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import codec
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.actions import SyncerAction
from lightning_diloco.protocol.limits import Scalar
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.claims import implausible_tokens
from lightning_diloco.protocol.syncer.joins import Joins
from lightning_diloco.protocol.syncer.roster import Member


class SyncerState(Joins):
    """Decides which learners take part, which rounds open and close, and which contributions are committed.

    Args:
        run: run id.
        options: run options fixed by the syncer's own flags.
        expect: number of learners to wait for before the first step; None: do not wait.
        heartbeat_s: seconds between learners' heartbeats.
        secret: secret of a new run (`proofs.py`); a restored run keeps its own.
    """

    def __init__(
        self,
        *,
        run: str,
        options: dict[str, Scalar] | None = None,
        expect: int | None = None,
        heartbeat_s: float = 1.0,
        secret: str = "",
    ) -> None:
        super().__init__(run=run, options=dict(options or {}), expect=expect, heartbeat_s=heartbeat_s, secret=secret)
        self._no_verdict()
        self._applying: dict[int, records.CommitRecord] = {}

    def _no_verdict(self) -> None:
        """Reset the evaluation: no learner has evaluated the current anchor."""
        self.eval_loss: float | None = None
        self.eval_reason: str | None = "no learner has evaluated the final anchor"
        self.has_verdict = False

    # ------------------------------------------------------------------------------------------------------ dispatch

    def handle(self, event: on.SyncerEvent, now_s: float) -> list[SyncerAction]:
        """Process one event.

        Args:
            event: the event.
            now_s: monotonic time of the event; never decreases from one call to the next.

        Returns:
            The actions to carry out, in order.
        """
        self._now_s = now_s
        todo = self._dispatch(event, now_s)
        return todo if self._outlived is None else todo + self._regenerate(self._outlived)

    def _dispatch(self, event: on.SyncerEvent, now_s: float) -> list[SyncerAction]:
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
                return self._committed(self._applying.pop(event.fragment), event.digest, now_s)
            case on.CommitFailed():
                self._applying.pop(event.fragment, None)
                return self.rounds.commit_failed(event.fragment, event.round, event.error, now_s)
            case on.PayloadsLost():
                if self.manifest is None:
                    return self._seed_again()
                return self.rounds.payloads_lost(event.fragments, now_s)
            case on.Tick():
                return self._tick(event, now_s)
            case on.StoodStill():
                return self._stood_still(event, now_s)

    def _hear(self, session: str, message: msg.FromLearner, now_s: float) -> list[SyncerAction]:
        member = self.roster.get(session)
        if isinstance(message, msg.Hello):
            return self._hello(session, member, message, now_s)
        if member is None:
            return [self._unknown(session)]
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
            case msg.AskRanges():
                return todo + self._ask_ranges(member, message)
            case msg.Intent() if self._is_fragment(message.fragment):
                return todo + self.rounds.intent(member, message, now_s)
            case msg.Ready() if self._is_fragment(message.fragment):
                if self._is_out_of_step(message):
                    return todo + self._invite(member)
                return todo + self.rounds.ready(member, message, now_s)
            case msg.Decline() if self._is_fragment(message.fragment):
                return todo + self.rounds.decline(member, message.fragment, message.round, now_s)
            case msg.AskFate() if self._is_fragment(message.fragment):
                return todo + self.rounds.tell_fate(member, message.fragment, message.seq)
        return [*todo, do.Note("ignored", {"learner": member.learner, "message": type(message).__name__})]

    def _is_fragment(self, p: int) -> bool:
        return 0 <= p < len(self.rounds.fragments)

    # -------------------------------------------------------------------------------------------------- taking part

    def _heartbeat(self, member: Member, message: msg.Heartbeat, now_s: float) -> list[SyncerAction]:
        progress = message.progress
        if not self._is_whole(progress):
            return [do.Note("ignored", {"learner": member.learner, "message": "Heartbeat of a wrong length"})]
        if problem := implausible_tokens(member, self.roster, tokens=progress.tokens, steps=progress.step):
            return self._disbelieve(member, problem)
        member.hear(progress, message.phase, now_s)
        member.step_s, member.tokens_per_s, member.metrics = message.step_s, message.tokens_per_s, message.metrics
        account = self.account(member)
        todo = self._stop(member, message.stop)
        if self._is_out_of_step(progress):
            account.seen = max(account.seen, progress.tokens)
            todo += self._invite(member)
        elif not account.declare(progress):
            self.num_inexact += 1
            todo.append(do.Note("ledger", {"learner": member.learner, "progress": codec.dump(progress)}))
        elif self.leases.catalogue is None:  # with data leases, finished ranges settle the account
            account.settle()
        if not member.takes_part(now_s, self.heartbeat_s):
            todo += self.rounds.remove(member, now_s)
        return [*todo, do.Send(member.session, self._run_is(member))]

    def _disbelieve(self, member: Member, problem: str) -> list[SyncerAction]:
        """Ignore a message with an implausible token counter, and tell the learner to stop."""
        told = do.Send(member.session, msg.Rejected("config", problem))
        if member.is_disbelieved:
            return [told]
        member.is_disbelieved = True
        return [told, do.Note("rejected", {"learner": member.learner, "text": problem})]

    def _stop(self, member: Member, reason: str | None) -> list[SyncerAction]:
        """End the run if this learner asks for it; the others learn of it from the reply to their next heartbeat."""
        if reason is None or self.stopped is not None:
            return []
        record = records.Stopped(reason)
        self.apply(record)
        note = do.Note("stopped", {"learner": member.learner, "reason": reason})
        return [do.Record(records.encode(record)), note]

    def _payload(self, event: on.PayloadReceived, now_s: float) -> list[SyncerAction]:
        member = self.roster.get(event.session)
        if member is None or member.state != "active" or not self._is_fragment(event.ready.fragment):
            dropped = do.DropPayload(event.session, event.ready.fragment, event.ready.seq)
            return [dropped, self._fenced(member)] if member and member.state == "fenced" else [dropped]
        todo = self._heard_from(member, now_s)
        if self._is_out_of_step(event.ready):
            return [*todo, do.DropPayload(member.session, event.ready.fragment, event.ready.seq), *self._invite(member)]
        return todo + self.rounds.payload(member, event.ready, event.error, now_s)

    def may_merge(self, session: str, ready: msg.Ready) -> bool:
        """Return whether a payload could still be merged, so that it is worth keeping. Any thread."""
        member = self.roster.get(session)
        if member is None or member.state != "active" or ready.generation != self.rounds.generation:
            return False
        decided = member.fates.get(ready.fragment)
        return decided is None or ready.seq > decided[0]

    def _is_whole(self, progress: msg.Progress) -> bool:
        return len(progress.landed) == len(progress.pending) == len(self.rounds.fragments)

    def _is_out_of_step(self, said: msg.Ready | msg.Progress) -> bool:
        """Return whether a message names another generation, or a version above the current one."""
        fragments = self.rounds.fragments
        if said.generation != self.rounds.generation:
            return True
        if isinstance(said, msg.Ready):
            return said.base > fragments[said.fragment].version
        return any(landed > f.version for landed, f in zip(said.landed, fragments, strict=True))

    def _merged(self, event: on.Merged, now_s: float) -> list[SyncerAction]:
        todo = self.rounds.merged(event, now_s)
        for action in todo:
            if isinstance(action, do.Apply):
                self._applying[event.fragment] = action.commit
        return todo

    def _committed(self, commit: records.CommitRecord, digest: str, now_s: float) -> list[SyncerAction]:
        self._no_verdict()  # the evaluated anchor is no longer the newest
        todo = self.rounds.committed(commit, digest, now_s)
        self._follow(commit)
        return todo

    def _regenerate(self, outlived: int) -> list[SyncerAction]:
        """Begin a generation above `outlived`, the highest one that a learner has proved and this syncer has lost."""
        if self.rounds.is_committing():
            return []  # this commit is valid; wait until it is written
        self._outlived = None
        record = records.Regenerated(max(outlived, self.rounds.generation) + 1)
        self.apply(record)
        todo: list[SyncerAction] = [
            do.Record(records.encode(record)),
            do.Note("regenerated", {"generation": record.generation}),
        ]
        for member in self.roster.in_state("active"):
            todo += self.rounds.drop_contributions(member) + self._settle(member, gives_back=True)
            todo += self._invite(member)
        return todo

    # ------------------------------------------------------------------------------------------------------- leaving

    def _leave(self, member: Member, message: msg.Leave, now_s: float) -> list[SyncerAction]:
        if member.state == "left":
            return [do.Send(member.session, msg.LeaveNoted(self._is_last()))]
        if self.rounds.is_committing(member):
            return []  # the learner repeats the message
        if member.state in ("joining", "confirmed"):
            return self._invite(member)  # the record that it takes part was lost; it says hello again
        if not self._is_whole(message.progress) or member.state != "active":
            return [do.Note("ignored", {"learner": member.learner, "message": "Leave"})]
        if self._is_out_of_step(message.progress):
            return self._invite(member)
        books = message.progress
        if problem := implausible_tokens(member, self.roster, tokens=books.tokens, steps=books.step):
            return self._disbelieve(member, problem)
        member.hear(message.progress, "draining", now_s)
        member.tokens_per_s, member.metrics, member.ended_s = message.tokens_per_s, message.metrics, now_s
        todo = self._stop(member, message.stop) + self.rounds.drop_contributions(member)
        self.leases.hear(member.session, message.begun)
        todo += self._settle(member, gives_back=True)
        record = records.Departed(member.session, message.reason, message.progress)
        self.apply(record)
        todo += self.rounds.remove(member, now_s)
        note = do.Note(
            "leave", {"learner": member.learner, "reason": message.reason, "tokens": message.progress.tokens}
        )
        noted = do.Send(member.session, msg.LeaveNoted(self._is_last()))
        return [*todo, do.Record(records.encode(record)), note, noted]

    def finish(self) -> None:
        """Close the accounts at the end of the run: unmerged tokens of lapsed learners become discarded."""
        for member in self.roster.in_state("active"):
            self.account(member).close("lapsed")

    @property
    def is_finished(self) -> bool:
        """Whether there were learners, and all of them have left or lapsed."""
        took_part = self.roster.in_state("active", "left")
        return bool(took_part) and self._is_last()

    @property
    def ended_by_finishing(self) -> bool:
        """Whether the last learner to leave had finished training, and no learner became active after it.

        A lapsed learner may still return.
        """
        left = [(m.ended_s, m.ending) for m in self.roster.in_state("left") if m.ended_s is not None]
        ended_s, ending = max(left, key=lambda it: it[0], default=(0.0, None))
        came = [m.active_s for m in self.roster.in_state("active") if m.active_s is not None]
        return ending == "finished" and not any(active_s > ended_s for active_s in came)

    # ----------------------------------------------------------------------------------------------------- over time

    def _tick(self, tick: on.Tick, now_s: float) -> list[SyncerAction]:
        todo: list[SyncerAction] = []
        for session, heard_s in tick.heard.items():
            self.roster.heard(session, heard_s)
        for member in self.roster.in_state("active"):
            silent_s = now_s - member.heard_s
            if not member.is_lapsed and silent_s > self.config.lease_s:
                todo += self._lapse(member, now_s)
            elif member.is_live and member.is_stalled(now_s, self.heartbeat_s):
                todo += self.rounds.remove(member, now_s)
        todo += self._pass_on_seed_lease(now_s)
        if self._may_start(now_s):
            todo += [a for m in self.roster.in_state("confirmed") for a in self._activate(m, now_s)]
        return todo + self.rounds.tick(now_s)

    def _lapse(self, member: Member, now_s: float) -> list[SyncerAction]:
        todo = self._settle(member, gives_back=True)
        record = records.Lapsed(member.session, self.account(member).heard())
        self.apply(record)
        note = do.Note("lapse", {"learner": member.learner, "silent_s": round(now_s - member.heard_s, 3)})
        return [*todo, do.Record(records.encode(record)), note, *self.rounds.remove(member, now_s)]

    def resume(self, now_s: float) -> None:
        """Continue after a restore: each session gets a new lease, so that it has time to reconnect."""
        self._now_s = now_s
        self.leases.resume(now_s)
        self._has_started = self._has_started or bool(self.roster.in_state("active", "left"))
        self._renew_leases(now_s)

    def _stood_still(self, event: on.StoodStill, now_s: float) -> list[SyncerAction]:
        """Renew all leases: while the process was suspended, it could not receive messages."""
        self._renew_leases(now_s)
        return [do.Note("stood still", {"for_s": round(event.for_s, 3)})]

    def _renew_leases(self, now_s: float) -> None:
        for member in self.roster.members.values():
            member.heard_s = member.stepped_s = now_s
