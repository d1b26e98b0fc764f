"""The learner's state machine, after it has adopted the anchors.

1. Progress is `param - anchor`. Progress that was not merged stays in the parameters; this file only books its tokens.
2. Each fragment has at most one outstanding contribution. No further snapshot is taken before its fate is known.
3. "Merged at v" changes nothing until v lands. With carry, "superseded" drops nothing: the next range starts where the
   last one did.
4. No update lands while the pseudo-gradient of its fragment is being encoded, nor during evaluation.
5. Messages may be lost, repeated or late. Intents, fates, fetches and leaves are repeated until they are answered.
6. Messages of another generation are ignored; only a `Welcome` changes the generation.

Source: the paper's learner loop (arXiv 2604.21428, Sec. 3); intents one step ahead and base-relative contributions are
our choice.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from statistics import median
from typing import Literal

from lightning_diloco.config import PROTOCOL_VERSION, Align
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import limits
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.actions import LearnerAction
from lightning_diloco.protocol.learner.boundary_promises import Promises
from lightning_diloco.protocol.learner.drain import Drain
from lightning_diloco.protocol.learner.fragment import Fragment
from lightning_diloco.protocol.learner.leases import LeaseHolder

MAX_REFUSALS = 3
NUM_ROUNDS = 16
INTENT_AGAIN_S = 0.1


class LearnerState:
    """Decides what a learner sends, snapshots, fetches and lands, and when.

    Args:
        learner, incarnation: identity of the learner.
        generations, versions, proofs: adopted anchors, per fragment; a syncer whose disk was rolled back accepts
            versions only with a proof.
        due: returns the fragment that is due at a step, or None (`core.schedule.fragment_due`).
        sync_every, overlap: H and tau, in steps.
        align: landing rule; decides which tokens a landing drops.
        heartbeat_s: seconds between heartbeats.
        drain_s: how long `Finish` waits for the last contributions; None: as long as they advance (`drain.py`).
        transfer_s: seconds to adopt a fragment, used as duration of a round until one is measured.
        has_ranks: the learner has several ranks (`boundary_promises.py`).
    """

    def __init__(
        self,
        *,
        learner: str,
        incarnation: int,
        generations: tuple[int, ...],
        versions: tuple[int, ...],
        due: Callable[[int], int | None],
        sync_every: int,
        overlap: int,
        align: Align = "carry",
        heartbeat_s: float = 1.0,
        drain_s: float | None = None,
        transfer_s: float = 0.0,
        has_ranks: bool = False,
        proofs: tuple[str, ...] = (),
    ) -> None:
        self.learner = learner
        self.incarnation = incarnation
        self.generation = min(generations)
        adopted = zip(generations, versions, proofs or ("",) * len(versions), strict=True)
        self.fragments = [Fragment(g, v, v, proof=proof) for g, v, proof in adopted]
        self.step = 0
        self.tokens = 0
        self.phase: msg.Phase = "stepping"
        self.discarded: Counter[str] = Counter()
        self.step_s = self.long_step_s = 0.0
        self.tokens_per_s = 0.0
        self.metrics: dict[str, float] = {}
        self.num_refusals = 0
        self._warned: str | None = None
        self._proof_of_session = ""
        self.others_tokens = 0
        self.stopped: str | None = None
        self._stop_reason: str | None = None
        self._due = due
        self._min_period_steps = sync_every - overlap
        self._keeps_all = align == "carry"
        self.lessee = LeaseHolder(drops=align != "carry")
        self._heartbeat_s = heartbeat_s
        self._drain_s = drain_s
        self._rounds_s = deque([transfer_s], NUM_ROUNDS)
        self._promises = Promises(has_ranks)
        self._next_heartbeat_s = float("-inf")
        self._leave_reason: msg.Reason | None = None
        self._drain_clock: Drain | None = None
        self._is_leaving = False
        self._has_left = False

    # ------------------------------------------------------------------------------------------------------ dispatch

    def handle(self, event: on.LearnerEvent, now_s: float) -> list[LearnerAction]:
        """Process one event that happened at now_s; returns the actions to carry out, in order."""
        if self._has_left:
            return []
        match event:
            case on.StepDone():
                return self._step_done(event, now_s)
            case on.StepBegins():
                return [] if self._is_leaving else [self._promises.make(self.fragments)]
            case on.Pause():
                if self._drain_clock and not event.is_online and not self._is_leaving:
                    self._drain_clock.wait_for_the_syncer(now_s)
                return self._boundary(now_s) + self._drain(now_s)
            case on.Evaluating():
                return self._set_evaluating(event.begins, now_s)
            case on.StopRun():
                self._stop_reason = event.reason[: limits.MAX_CHARS]
                return [self._heartbeat(now_s)]
            case on.Finish():
                return self._finish(event, now_s)
            case on.FromTheSyncer():
                return self._hear(event.message, now_s)
            case on.Reconnected():
                return [do.Say(self._hello(event))]
            case on.Encoded():
                return self._encoded(event)
            case on.Uploaded() | on.UploadFailed():
                return self._upload_ended(event, now_s)
            case on.Staged():
                self.fragments[event.fragment].stage(event, self.generation)
                return []
            case on.FetchFailed():
                self.fragments[event.fragment].is_fetching = False
                return []
            case on.Tick():
                return self._tick(now_s)

    def _hello(self, event: on.Reconnected) -> msg.Hello:
        return msg.Hello(
            self.learner, event.connection, PROTOCOL_VERSION, {}, known=event.known, proof=self._proof_of_session
        )

    @property
    def progress(self) -> msg.Progress:
        """This learner's progress report, as of now."""
        return msg.Progress(
            step=self.step,
            tokens=self.tokens,
            landed=tuple([f.landed for f in self.fragments]),
            pending=tuple([f.pending(self.tokens) for f in self.fragments]),
            discarded=dict(+self.discarded),
            generation=self.generation,
        )

    @property
    def drain_until_s(self) -> float:
        """Time at which the drain ends, unless contributions advance; 0 before `Finish`."""
        return self._drain_clock.until_s if self._drain_clock else 0.0

    @property
    def fleet_tokens(self) -> int:
        """Tokens seen by all learners: its own exactly, those of others as last reported by the syncer."""
        return self.others_tokens + self.tokens

    @property
    def staleness_versions(self) -> int:
        """Versions that the stalest fragment is behind the newest offer."""
        return max(f.offered - f.landed for f in self.fragments)

    # ------------------------------------------------------------------------------------------------- step boundary

    def _step_done(self, event: on.StepDone, now_s: float) -> list[LearnerAction]:
        self.lessee.trained(event.pieces, self.tokens)
        self.step, self.tokens = event.step, event.tokens
        todo = self._boundary(now_s)
        p = self._due(event.step + 1)
        if p is not None:
            f = self.fragments[p]
            if not f.is_due and event.step + 1 - f.snapshot_step >= self._min_period_steps:
                f.is_due, f.intent_s = True, float("-inf")
        return todo + self._intents(now_s)

    def _intents(self, now_s: float) -> list[LearnerAction]:
        """Return an intent for each fragment that is due.

        An intent may be lost, so it is repeated until it is answered. Steps may take a millisecond, and intents of each
        step would flood the syncer.
        """
        due = [p for p, f in enumerate(self.fragments) if f.is_due and now_s - f.intent_s >= INTENT_AGAIN_S]
        for p in due:
            self.fragments[p].intent_s = now_s
        return [do.Say(self._intent(p)) for p in due]

    def _intent(self, p: int, patience_s: float = 0.0) -> msg.Intent:
        return msg.Intent(p, self.step_s, patience_s, self.long_step_s)

    def _boundary(self, now_s: float) -> list[LearnerAction]:
        if self._is_leaving:
            return []
        todo: list[LearnerAction] = []
        for p, f in enumerate(self.fragments):
            if f.staged is not None and f.can_land and self._promises.allow_landing(p):
                todo += self._land(p, f, f.staged, now_s)
            if f.announced is not None:
                todo += self._answer(p, f, f.announced, now_s)
        return todo + [action for message in self._promises.end_boundary() for action in self._hear(message, now_s)]

    def _land(self, p: int, f: Fragment, staged: on.Staged, now_s: float) -> list[LearnerAction]:
        todo: list[LearnerAction] = [do.Land(p)]
        f.landed, f.generation, f.proof, f.staged = staged.version, staged.generation, staged.proof, None
        f.outlived = None
        mine = f.outstanding
        if mine and staged.merged_seq == mine.ready.seq:
            self._rounds_s.append(now_s - mine.began_s)
            self._advanced(now_s)
            self._merge_landed(f, mine.ready, staged.kept)
            todo.append(do.Forget(p, mine.ready.seq))
        if f.must_adopt or not self._keeps_all:
            self._book(f.must_adopt or "overwritten", f.drop_fresh(self.step, self.tokens))
            f.must_adopt = None
        return todo + f.fetch(p)

    def _merge_landed(self, f: Fragment, ready: msg.Ready, kept: float) -> None:
        """Book a contribution that has landed, or the part of it that the norm guard has kept."""
        stop = ready.stop_if(kept)
        f.merged_tokens += stop - ready.start
        self.num_refusals, self._warned = 0, None
        if self._keeps_all:
            f.take_back(kept)
        else:
            f.drop_outstanding()
            self._book("overwritten", ready.stop - stop)

    def _answer(self, p: int, f: Fragment, round_id: int, now_s: float) -> list[LearnerAction]:
        is_merged = f.outstanding is not None and f.outstanding.merged_at is not None
        if is_merged or not (f.outstanding or self._promises.allow_snapshot(p)):
            return []  # answer after the update that contains it has landed, or after the other ranks know
        f.announced = None
        if f.outstanding:
            return [do.Say(f.outstanding.ready)]  # ready for this round too; the syncer may have restarted
        if f.must_adopt or self.tokens <= f.fresh_from or self.step <= f.fresh_step:
            return [do.Say(msg.Decline(p, round_id))]
        ready = f.snapshot(p, self.step, self.tokens, self.lessee, now_s)
        return [do.Snapshot(ready), do.Say(ready)]

    # ----------------------------------------------------------------------------------------------- what is heard

    def _hear(self, message: msg.FromSyncer, now_s: float) -> list[LearnerAction]:
        if self._promises.postpone(message):
            return []
        match message:
            case msg.Announce():
                return self._announced(message, now_s)
            case msg.Commit():
                return self._committed(message, now_s)
            case msg.FateIs():
                return self._fate(message)
            case msg.Leases():
                self.lessee.hear(message)
                return []
            case msg.RunIs():
                return self._note_run(message)
            case msg.Active():
                self._note_run(message.run)
                self._proof_of_session = message.proof
                return [a for announcement in message.announcements for a in self._announced(announcement, now_s)]
            case msg.Welcome():
                return self._welcome_back(message, now_s)
            case msg.LeaveNoted():
                self._has_left = True
                return [do.Left(message.is_last)]
            case msg.Rejected():
                return [do.Fail("FencedError" if message.error == "fenced" else "JoinError", message.text)]
            case msg.SeedGrant():
                return []  # a late message of the join

    def _note_run(self, run: msg.RunIs) -> list[LearnerAction]:
        self.others_tokens = max(self.others_tokens, run.others_tokens)
        self.stopped = self.stopped or run.stopped
        return []

    def _announced(self, message: msg.Announce, now_s: float) -> list[LearnerAction]:
        p, f = message.fragment, self.fragments[message.fragment]
        if message.round < f.last_round or (message.round == f.last_round and f.announced is not None):
            return []
        is_repeated = message.round == f.last_round
        f.is_due, f.last_round = f.is_due and is_repeated, message.round
        if f.outstanding and f.outstanding.merged_at is None:
            f.answered_with_old = message.round
            return [do.Say(f.outstanding.ready), *f.outstanding.ask_fate(now_s, at_once=True)]
        if is_repeated or self.phase == "evaluating":
            return [do.Say(msg.Decline(p, message.round))]
        f.announced = message.round
        return []

    def _committed(self, message: msg.Commit, now_s: float) -> list[LearnerAction]:
        if message.generation != self.generation:
            return []
        p, f = message.fragment, self.fragments[message.fragment]
        f.offered = max(f.offered, message.version)
        mine = f.outstanding
        todo = f.fetch(p)
        if mine is None:
            return todo
        if msg.Contributor(self.learner, self.incarnation, mine.ready.seq) in message.contributors:
            mine.merged_at = message.version
            self._advanced(now_s)
            return todo
        return todo + mine.ask_fate(now_s, at_once=True)

    def _fate(self, message: msg.FateIs) -> list[LearnerAction]:
        p, f = message.fragment, self.fragments[message.fragment]
        mine = f.outstanding
        if mine is None or mine.ready.seq != message.seq or mine.merged_at is not None:
            return []
        match message.fate:
            case "held":
                mine.is_held = True
                return []
            case "unknown":
                return mine.upload()
            case "merged":
                mine.merged_at = message.version
                f.offered = max(f.offered, message.version or 0)
                return f.fetch(p)
            case "superseded":
                if self._keeps_all:
                    f.take_back()
                else:
                    self._book("superseded", f.drop_outstanding())
                if f.answered_with_old == f.last_round and self.phase != "evaluating":
                    f.announced = f.last_round  # answer it again, with a new contribution
                return [do.Forget(p, message.seq)]
            case "refused":
                return self._warn(p, "refused", message.reason) + self._refused(p, f, message)
            case "quarantined":
                return self._warn(p, "quarantined", message.reason) + self._adopt(p, f, message)

    def _warn(self, p: int, fate: Literal["refused", "quarantined"], reason: str | None) -> list[LearnerAction]:
        """Warn the user of a refusal or quarantine, once until a contribution is merged again."""
        if self._warned == fate:
            return []
        self._warned = fate
        what = {
            "refused": f"a contribution to fragment {p} was refused",
            "quarantined": "this learner is in quarantine: it is not merged until it agrees with the others again",
        }
        return [do.Warn(f"{what[fate]}; the learner continues from the anchor. Reason: {reason or 'none given'}")]

    def _adopt(self, p: int, f: Fragment, message: msg.FateIs) -> list[LearnerAction]:
        """Drop the contribution and all progress in this fragment, and adopt the anchor."""
        self._book("refused", f.drop_outstanding())
        f.must_adopt, f.staged = "refused", None
        return [do.Forget(p, message.seq), *f.fetch(p)]

    def _refused(self, p: int, f: Fragment, message: msg.FateIs) -> list[LearnerAction]:
        todo = self._adopt(p, f, message)
        self.num_refusals += 1
        if self.num_refusals >= MAX_REFUSALS:
            text = (
                f"{self.num_refusals} contributions in a row were refused, the last one of fragment {p}: "
                f"{message.reason or 'no reason given'}. "
                "Pseudo-gradients must be finite and within the norm guard. Look for NaN, and compare the learning "
                "rate with the other learners': a schedule by epochs begins anew in a learner that finds no "
                "checkpoint. Use a schedule by steps with max_steps, or FleetTokenLR, which begin where the run is, or "
                "give all learners a checkpoint_store that they can read."
            )
            return [do.Fail("RefusedError", text)]
        return todo

    def _welcome_back(self, message: msg.Welcome, now_s: float) -> list[LearnerAction]:
        """Process a Welcome after a reconnect; in a new generation, adopt all anchors.

        A disk may be rolled back a second time, to another start of the same generation. So a fragment that has not
        adopted the generation yet begins it again, also if the syncer was only away: it fetches the anchor again.
        """
        todo: list[LearnerAction] = []
        generation = max(message.generations)
        if self._drain_clock:
            self._drain_clock.forget_intents()
        # Without an adopted generation, it has no proof of it: the syncer may have lost it, or another one has its
        # number.
        has_adopted = any(f.generation == self.generation for f in self.fragments)
        is_anew = generation > self.generation or not has_adopted
        self.lessee.welcomed(is_anew=is_anew)
        merged = message.merged or (0,) * len(self.fragments)
        for p, f in enumerate(self.fragments):
            f.announced, f.last_round = None, -1
            if is_anew or (generation == self.generation != f.generation):
                todo += [do.Forget(p, f.outstanding.ready.seq)] if f.outstanding else []
                self._book("restored", f.rolled_back(message.versions[p], merged[p]))
                todo += f.fetch(p)
            elif generation == self.generation:
                f.welcomed_back(message.versions[p])
                todo += f.fetch(p) + f.ask_fate(now_s, at_once=True)
        is_ahead = any(f.landed > version for f, version in zip(self.fragments, message.versions, strict=True))
        if not is_anew and (is_ahead or generation < self.generation):
            return [*todo, do.SayHello()]  # the new hello has the proofs of versions that landed since the last one
        self.generation = generation
        return [*todo, self._leave() if self._is_leaving else self._heartbeat(now_s)]

    # ------------------------------------------------------------------------------------------------- own threads

    def _encoded(self, event: on.Encoded) -> list[LearnerAction]:
        f = self.fragments[event.fragment]
        if f.outstanding is None or f.outstanding.ready.seq != event.seq:
            return [do.Forget(event.fragment, event.seq)]  # decided before it was encoded
        f.outstanding.is_encoded = True
        return f.outstanding.upload()

    def _upload_ended(self, event: on.Uploaded | on.UploadFailed, now_s: float) -> list[LearnerAction]:
        mine = self.fragments[event.fragment].outstanding
        if mine is None or mine.ready.seq != event.seq:
            return []
        mine.is_uploading = False
        if isinstance(event, on.Uploaded) and not mine.was_uploaded:
            mine.was_uploaded = True
            self._advanced(now_s)
        return mine.ask_fate(now_s) if isinstance(event, on.UploadFailed) else []

    # ----------------------------------------------------------------------------------------------------- over time

    def _tick(self, now_s: float) -> list[LearnerAction]:
        if self._is_leaving:
            return [self._leave()]
        todo: list[LearnerAction] = []
        for p, f in enumerate(self.fragments):
            if f.must_adopt or f.offered > f.landed:  # most fragments are idle
                todo += f.fetch(p)
            if f.outstanding:
                todo += f.outstanding.ask_fate(now_s)
        todo += map(do.Say, self.lessee.ask(now_s, self.generation, self.tokens_per_s, wants=self.phase != "draining"))
        if now_s >= self._next_heartbeat_s:
            todo.append(self._heartbeat(now_s))
        return todo

    def _heartbeat(self, now_s: float) -> LearnerAction:
        self._next_heartbeat_s = now_s + self._heartbeat_s
        said = (self.phase, self.progress, self.step_s, self.tokens_per_s, self._finite())
        return do.Say(msg.Heartbeat(*said, stop=self._stop_reason))

    def _finite(self) -> dict[str, float]:
        """Return the finite metrics: messages cannot hold NaN, and a diverged loss must not stop heartbeats."""
        return {name: value for name, value in self.metrics.items() if math.isfinite(value)}

    def _set_evaluating(self, begins: bool, now_s: float) -> list[LearnerAction]:
        if self.phase == "draining":
            return []
        self.phase = "evaluating" if begins else "stepping"
        todo: list[LearnerAction] = []
        for p, f in enumerate(self.fragments):
            if begins and f.announced is not None:
                todo.append(do.Say(msg.Decline(p, f.announced)))
                f.announced = None
        return [*todo, self._heartbeat(now_s)]

    # ------------------------------------------------------------------------------------------------------- the end

    def _finish(self, event: on.Finish, now_s: float) -> list[LearnerAction]:
        self._leave_reason = event.reason
        self.phase = "draining"
        self._drain_clock = Drain(
            now_s,
            is_wanted=event.drain,
            fixed_s=self._drain_s if event.within_s is None else event.within_s,
            round_s=median(self._rounds_s),
            num_fragments=len(self.fragments),
        )
        # A learner that leaves without draining, for example after an error, keeps its parameters as they are.
        boundary = self._boundary(now_s) if event.drain else []
        return [self._heartbeat(now_s), *boundary, *self._drain(now_s)]

    def _drain(self, now_s: float) -> list[LearnerAction]:
        """Ask for rounds until everything is merged and landed, then leave."""
        if self._drain_clock is None or self._is_leaving:
            return []
        if now_s < self._drain_clock.until_s and not all(f.is_drained(self.tokens) for f in self.fragments):
            waiting = [p for p, f in enumerate(self.fragments) if f.wants_round(self.tokens) and f.announced is None]
            patience_s = self._drain_clock.patience_s(now_s)
            return [do.Say(self._intent(p, patience_s)) for p in self._drain_clock.due(waiting, now_s)]
        self._is_leaving = True
        return [self._leave()]

    def _advanced(self, now_s: float) -> None:
        """Note that a contribution was uploaded, merged or landed."""
        if self._drain_clock:
            self._drain_clock.extend(now_s)

    def _leave(self) -> LearnerAction:
        assert self._leave_reason is not None
        said = (self._leave_reason, self.progress, self.tokens_per_s, self._finite(), self.lessee.begun)
        return do.Say(msg.Leave(*said, stop=self._stop_reason))

    def _book(self, cause: str, tokens: int) -> None:
        """Book discarded tokens. A newer backup may hold merges that an older one had lost; these are taken back."""
        if tokens:
            self.discarded[cause] += tokens
        assert self.discarded[cause] >= 0, f"{tokens} tokens {cause}"
