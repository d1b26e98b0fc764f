"""The learner's side of the protocol, from the moment it has adopted the anchors.

1. Progress is `param - anchor`. What was not merged stays in the parameters; here only token ranges are booked.
2. At most one contribution per fragment is outstanding; while it is, the fragment is not snapshotted again.
3. "Merged at v" changes nothing until v lands. Superseded (carry) changes nothing at all: the next range starts where
   the last one did.
4. Nothing lands while its fragment's delta is being encoded, nor during evaluation.
5. Messages may be lost, repeated or late: intents, fates, fetches and leaves are asked again until answered.

Source: protocol page, sections 3, 5, 6 and 8; the rules of the paper's learner loop (Sec. 3) with base-relative
contributions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning_diloco.config import Align
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.actions import LearnerAction

ASK_AGAIN_S = 3.0
MAX_REFUSALS = 3


@dataclass(slots=True)
class Outstanding:
    """A contribution whose fate has not landed yet."""

    ready: msg.Ready
    stop_step: int
    is_encoded: bool = False
    merged_at: int | None = None
    asked_s: float = 0.0


@dataclass(slots=True)
class Fragment:
    """What this learner knows of one fragment.

    Args:
        fresh_from, fresh_step: token counter and step from which nothing has been snapshotted.
        announced: round that waits for my snapshot.
    """

    generation: int
    landed: int
    offered: int
    fresh_from: int = 0
    fresh_step: int = 0
    snapshot_step: int = 0
    seq: int = 0
    outstanding: Outstanding | None = None
    staged: on.Staged | None = None
    is_fetching: bool = False
    must_adopt: Literal["refused", "restored"] | None = None
    is_due: bool = False
    announced: int | None = None
    last_round: int = -1


class LearnerState:
    """Decides what a learner says, snapshots, fetches and lands, and when.

    Args:
        learner, incarnation: who this is.
        generations, versions: what was adopted, per fragment.
        due: fragment due at a step, or None (`core.schedule.fragment_due`).
        sync_every, overlap: H and tau.
        align: landing rule; decides which tokens a landing drops.
        heartbeat_s: seconds between heartbeats.
        drain_s: how long `Finish` waits for the last contributions.
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
        drain_s: float = 60.0,
    ) -> None:
        self.learner = learner
        self.incarnation = incarnation
        self.fragments = [Fragment(g, v, v) for g, v in zip(generations, versions, strict=True)]
        self.step = 0
        self.tokens = 0
        self.phase: msg.Phase = "stepping"
        self.discarded: dict[str, int] = {}
        self.step_s = 0.0
        self.tokens_per_s = 0.0
        self.metrics: dict[str, float] = {}
        self.num_refusals = 0
        self._due = due
        self._min_period_steps = sync_every - overlap
        self._keeps_all = align == "carry"
        self._heartbeat_s = heartbeat_s
        self._drain_s = drain_s
        self._next_heartbeat_s = 0.0
        self._leave_reason: msg.Reason | None = None
        self._drain_until_s = 0.0
        self._final: msg.Leave | None = None
        self._has_left = False

    # ------------------------------------------------------------------------------------------------------ dispatch

    def handle(self, event: on.LearnerEvent, now_s: float) -> list[LearnerAction]:
        """What is to be done because of this event."""
        match event:
            case on.StepDone():
                self.step, self.tokens = event.step, event.tokens
                return self._boundary() + self._schedule(event.step + 1) + self._intents(now_s)
            case on.Pause():
                return self._boundary() + self._drain(now_s)
            case on.Evaluating():
                return self._set_evaluating(event.begins, now_s)
            case on.Finish():
                return self._finish(event, now_s)
            case on.FromTheSyncer():
                return self._hear(event.message, now_s)
            case on.Reconnected():
                hello = msg.Hello(self.learner, event.connection, 0, {}, known=event.known)
                return [do.Say(hello)]
            case on.Encoded():
                return self._encoded(event)
            case on.Uploaded():
                return []
            case on.UploadFailed():
                return self._ask_fate(event.fragment, now_s)
            case on.Staged():
                return self._stage(event)
            case on.FetchFailed():
                self.fragments[event.fragment].is_fetching = False
                return []
            case on.Tick():
                return self._tick(now_s)

    @property
    def progress(self) -> msg.Progress:
        """This learner's books, as of now."""
        return msg.Progress(
            step=self.step,
            tokens=self.tokens,
            landed=tuple(f.landed for f in self.fragments),
            pending=tuple(self._pending(f) for f in self.fragments),
            discarded=dict(self.discarded),
        )

    @property
    def staleness_versions(self) -> int:
        """How many versions the stalest fragment is behind what was offered."""
        return max(f.offered - f.landed for f in self.fragments)

    # ------------------------------------------------------------------------------------------------- step boundary

    def _boundary(self) -> list[LearnerAction]:
        todo: list[LearnerAction] = []
        for p, f in enumerate(self.fragments):
            if f.staged and (f.outstanding is None or f.outstanding.is_encoded):
                todo += self._land(p, f, f.staged)
            if f.announced is not None:
                todo += self._answer(p, f, f.announced)
        return todo

    def _land(self, p: int, f: Fragment, staged: on.Staged) -> list[LearnerAction]:
        todo: list[LearnerAction] = [do.Land(p)]
        f.landed, f.generation, f.staged = staged.version, staged.generation, None
        mine = f.outstanding
        if mine and staged.merged_seq == mine.ready.seq:
            f.outstanding = None
            todo.append(do.Forget(p, mine.ready.seq))
        if f.must_adopt:
            self._discard(f, f.must_adopt)
            f.must_adopt = None
        elif not self._keeps_all:
            self._discard(f, "overwritten")
        return todo + self._fetch(p, f)

    def _answer(self, p: int, f: Fragment, round_id: int) -> list[LearnerAction]:
        if f.outstanding and f.outstanding.merged_at is not None:
            return []  # an update that contains it is on its way; answer after it has landed
        f.announced = None
        if f.outstanding:
            return []  # it counts as held, so as ready, in this round
        if f.must_adopt or self.tokens <= f.fresh_from or self.step <= f.fresh_step:
            return [do.Say(msg.Decline(p, round_id))]
        f.seq += 1
        ready = msg.Ready(
            fragment=p,
            seq=f.seq,
            base=f.landed,
            generation=f.generation,
            start=f.fresh_from,
            stop=self.tokens,
            steps=self.step - f.fresh_step,
        )
        f.outstanding = Outstanding(ready, self.step)
        f.fresh_from, f.fresh_step, f.snapshot_step = self.tokens, self.step, self.step
        return [do.Snapshot(ready), do.Say(ready)]

    def _schedule(self, next_step: int) -> list[LearnerAction]:
        p = self._due(next_step)
        if p is not None:
            f = self.fragments[p]
            if f.outstanding or next_step - f.snapshot_step >= self._min_period_steps:
                f.is_due = True
        return []

    def _intents(self, now_s: float) -> list[LearnerAction]:
        return [do.Say(msg.Intent(p, self.step_s)) for p, f in enumerate(self.fragments) if f.is_due]

    # ----------------------------------------------------------------------------------------------- what is heard

    def _hear(self, message: msg.FromSyncer, now_s: float) -> list[LearnerAction]:
        match message:
            case msg.Announce():
                return self._announced(message, now_s)
            case msg.Commit():
                return self._committed(message, now_s)
            case msg.FateIs():
                return self._fate(message)
            case msg.Active():
                return [a for announcement in message.announcements for a in self._announced(announcement, now_s)]
            case msg.Welcome():
                return self._welcome_back(message, now_s)
            case msg.LeaveNoted():
                if self._has_left:
                    return []
                self._has_left = True
                return [do.Left(message.is_last)]
            case msg.Rejected():
                return [do.Fail("FencedError" if message.error == "fenced" else "JoinError", message.text)]
            case msg.SeedGrant():
                return [do.Fail("JoinError", "the syncer forgot this run; restore its run directory, or start anew")]

    def _announced(self, message: msg.Announce, now_s: float) -> list[LearnerAction]:
        f = self.fragments[message.fragment]
        if message.round <= f.last_round:
            has_answered = f.outstanding is None and f.announced is None
            return [do.Say(msg.Decline(message.fragment, message.round))] if has_answered else []
        f.is_due, f.last_round = False, message.round
        if self.phase == "evaluating":
            return [do.Say(msg.Decline(message.fragment, message.round))]
        f.announced = message.round
        return self._ask_fate(message.fragment, now_s)

    def _committed(self, message: msg.Commit, now_s: float) -> list[LearnerAction]:
        p, f = message.fragment, self.fragments[message.fragment]
        if message.generation > f.generation:
            return self._restore(p, f, message.version)
        f.offered = max(f.offered, message.version)
        mine = f.outstanding
        todo = self._fetch(p, f)
        if mine is None:
            return todo
        if msg.Contributor(self.learner, self.incarnation, mine.ready.seq) in message.contributors:
            mine.merged_at = message.version
            return todo
        return todo + self._ask_fate(p, now_s)

    def _fate(self, message: msg.FateIs) -> list[LearnerAction]:
        p, f = message.fragment, self.fragments[message.fragment]
        mine = f.outstanding
        if mine is None or mine.ready.seq != message.seq:
            return []
        match message.fate:
            case "held":
                return []
            case "unknown":
                return [do.Upload(mine.ready)] if mine.is_encoded else []
            case "merged":
                mine.merged_at = message.version
                f.offered = max(f.offered, message.version or 0)
                self.num_refusals = 0
                return self._fetch(p, f)
            case "superseded":
                self._drop_outstanding(f, "superseded")
                return [do.Forget(p, message.seq)]
            case "refused":
                return self._refused(p, f, message.reason or "no reason given")

    def _refused(self, p: int, f: Fragment, reason: str) -> list[LearnerAction]:
        assert f.outstanding is not None
        seq, f.fresh_from = f.outstanding.ready.seq, f.outstanding.ready.start
        f.outstanding, f.must_adopt, f.staged = None, "refused", None
        self.num_refusals += 1
        if self.num_refusals >= MAX_REFUSALS:
            text = (
                f"{self.num_refusals} contributions in a row were refused, the last one of fragment {p}: {reason}. "
                "Finite pseudo-gradients within the norm guard are accepted; lower the learning rate or look for NaN."
            )
            return [do.Fail("RefusedError", text)]
        return [do.Forget(p, seq), *self._fetch(p, f)]

    def _restore(self, p: int, f: Fragment, version: int) -> list[LearnerAction]:
        """The syncer's disk was rolled back: adopt in full, and book what was not merged."""
        todo: list[LearnerAction] = [do.Forget(p, f.outstanding.ready.seq)] if f.outstanding else []
        if f.outstanding:
            f.fresh_from = f.outstanding.ready.start
        f.outstanding, f.staged, f.must_adopt, f.offered = None, None, "restored", version
        return todo + self._fetch(p, f)

    def _welcome_back(self, message: msg.Welcome, now_s: float) -> list[LearnerAction]:
        todo: list[LearnerAction] = []
        for p, (f, generation, version) in enumerate(
            zip(self.fragments, message.generations, message.versions, strict=True)
        ):
            f.is_fetching, f.announced, f.last_round = False, None, -1
            if generation > f.generation:
                todo += self._restore(p, f, version)
                continue
            f.offered = max(f.offered, version)
            todo += self._fetch(p, f) + self._ask_fate(p, now_s, at_once=True)
        return [*todo, self._heartbeat(now_s)]

    # ------------------------------------------------------------------------------------------------- own threads

    def _encoded(self, event: on.Encoded) -> list[LearnerAction]:
        mine = self.fragments[event.fragment].outstanding
        if mine is None or mine.ready.seq != event.seq:
            return []
        mine.is_encoded = True
        return [do.Upload(mine.ready)]

    def _stage(self, event: on.Staged) -> list[LearnerAction]:
        f = self.fragments[event.fragment]
        f.is_fetching = False
        is_news = event.version > f.landed or event.generation > f.generation
        if event.is_full < (f.must_adopt is not None) or not (is_news or f.must_adopt):
            return self._fetch(event.fragment, f)
        f.staged = event
        f.offered = max(f.offered, event.version)
        return []

    def _fetch(self, p: int, f: Fragment) -> list[LearnerAction]:
        if f.is_fetching or f.staged or not (f.must_adopt or f.offered > f.landed):
            return []
        f.is_fetching = True
        seq = f.outstanding.ready.seq if f.outstanding else None
        return [do.Fetch(p, f.generation, f.landed, seq, f.must_adopt is not None)]

    # ----------------------------------------------------------------------------------------------------- over time

    def _tick(self, now_s: float) -> list[LearnerAction]:
        if self._has_left:
            return []
        if self._final:
            return [do.Say(self._final)]
        todo: list[LearnerAction] = []
        for p, f in enumerate(self.fragments):
            todo += self._fetch(p, f)
            if f.outstanding and f.outstanding.is_encoded and f.outstanding.merged_at is None:
                todo += self._ask_fate(p, now_s)
        if now_s >= self._next_heartbeat_s:
            todo.append(self._heartbeat(now_s))
        return todo

    def _heartbeat(self, now_s: float) -> LearnerAction:
        self._next_heartbeat_s = now_s + self._heartbeat_s
        return do.Say(msg.Heartbeat(self.phase, self.progress, self.step_s, self.tokens_per_s, dict(self.metrics)))

    def _ask_fate(self, p: int, now_s: float, *, at_once: bool = False) -> list[LearnerAction]:
        mine = self.fragments[p].outstanding
        if mine is None or not mine.is_encoded or mine.merged_at is not None:
            return []
        if not at_once and now_s - mine.asked_s < ASK_AGAIN_S:
            return []
        mine.asked_s = now_s
        return [do.Say(msg.AskFate(p, mine.ready.seq))]

    def _set_evaluating(self, begins: bool, now_s: float) -> list[LearnerAction]:
        if self.phase == "draining":
            return []
        self.phase = "evaluating" if begins else "stepping"
        todo: list[LearnerAction] = []
        for p, f in enumerate(self.fragments):
            if begins and f.announced is not None and f.outstanding is None:
                todo.append(do.Say(msg.Decline(p, f.announced)))
                f.announced = None
        return [*todo, self._heartbeat(now_s)]

    # ------------------------------------------------------------------------------------------------------- the end

    def _finish(self, event: on.Finish, now_s: float) -> list[LearnerAction]:
        self._leave_reason = event.reason
        self.phase = "draining"
        self._drain_until_s = now_s + (self._drain_s if event.drain else 0.0)
        return [self._heartbeat(now_s), *self._boundary(), *self._drain(now_s)]

    def _drain(self, now_s: float) -> list[LearnerAction]:
        """Ask for rounds until everything is merged and landed, then leave."""
        if self._leave_reason is None or self._final:
            return []
        if now_s < self._drain_until_s and not all(map(self._is_drained, self.fragments)):
            waiting = [p for p, f in enumerate(self.fragments) if not self._is_drained(f) and f.announced is None]
            return [
                do.Say(msg.Intent(p, self.step_s))
                for p in waiting
                if not ((mine := self.fragments[p].outstanding) and mine.merged_at is not None)
            ]
        self._final = msg.Leave(self._leave_reason, self.progress, self.tokens_per_s, dict(self.metrics))
        return [do.Say(self._final)]

    def _is_drained(self, f: Fragment) -> bool:
        return f.outstanding is None and f.fresh_from >= self.tokens and f.landed >= f.offered and not f.must_adopt

    # -------------------------------------------------------------------------------------------------------- ranges

    def _pending(self, f: Fragment) -> tuple[tuple[int, int], ...]:
        ranges = [(f.outstanding.ready.start, f.outstanding.ready.stop)] if f.outstanding else []
        if f.fresh_from < self.tokens:
            ranges.append((f.fresh_from, self.tokens))
        return tuple(ranges)

    def _discard(self, f: Fragment, cause: str) -> None:
        """Everything fresh is gone from the parameters."""
        self.discarded[cause] = self.discarded.get(cause, 0) + self.tokens - f.fresh_from
        f.fresh_from, f.fresh_step = self.tokens, self.step

    def _drop_outstanding(self, f: Fragment, cause: str) -> None:
        """Superseded: with carry the values are still in the parameters, so the range is fresh again."""
        assert f.outstanding is not None
        ready, f.outstanding = f.outstanding.ready, None
        if self._keeps_all:
            f.fresh_from, f.fresh_step = ready.start, f.fresh_step - ready.steps
        else:
            self.discarded[cause] = self.discarded.get(cause, 0) + ready.tokens
