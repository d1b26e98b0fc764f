"""A simulated fleet in one process, whose network delays, loses and repeats messages.

1. Learners and syncer use the real state machines, `LearnerState` and `SyncerState`.
2. Time is simulated and randomness is seeded. The same arguments give the same history.
3. The invariants are checked after every event (`invariants.py`). A violation reports the last events before it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from lightning_diloco.config import PROTOCOL_VERSION, RunConfig
from lightning_diloco.core.schedule import fragment_due
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.codec import Json
from lightning_diloco.protocol.learner.machine import LearnerState
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.protocol.syncer.succession import IN_FLIGHT
from lightning_diloco.simulate.crashes import CrashPoints, Killed
from lightning_diloco.simulate.disk import Disk
from lightning_diloco.simulate.invariants import Invariants
from lightning_diloco.simulate.process import SimulatedLearner
from lightning_diloco.simulate.settings import Network, Pace, manifest
from lightning_diloco.simulate.standby import Standby

TICK_S = 0.25
CONFIRM_AGAIN_S = 0.5
NUM_NOTES_KEPT = 1000


class Fleet:
    """Runs learners and a syncer against each other.

    Args:
        config: the run's config; `num_fragments` determines P.
        network: the network.
        merge_s: duration of one merge, and of one commit, on the syncer.
        seed: seed of all randomness.
        expect: number of learners that the first step waits for; None: it does not wait.
        crashes: points where the syncer is killed; it restarts immediately.
        guard: probability that the norm guard scales a contribution down.
        is_audited: check the invariants after every event, and keep the whole log. It is False for long forecasts,
            which cannot restart the syncer.
        tick_s: time between two ticks of all machines.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        network: Network | None = None,
        merge_s: float = 0.01,
        seed: int = 0,
        expect: int | None = None,
        crashes: CrashPoints | None = None,
        guard: float = 0.0,
        is_audited: bool = True,
        tick_s: float = TICK_S,
    ) -> None:
        self.config = config.validate()
        self.network = network or Network()
        self.merge_s = merge_s
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.syncer = SyncerState(run="simulated", expect=expect, secret="simulated")
        self.disk = Disk(keeps_log=is_audited)
        self.disk_is_full = False
        self.learners: dict[str, SimulatedLearner] = {}
        self.notes: deque[tuple[float, do.Note]] = deque(maxlen=None if is_audited else NUM_NOTES_KEPT)
        self.history: deque[tuple[float, str, object]] = deque(maxlen=80)
        self.num_events = 0
        self.invariants = Invariants(self)
        self.crashes = crashes or CrashPoints()
        self._expect = expect
        self._guard = guard
        self._is_audited = is_audited
        self._tick_s = tick_s
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._sessions = itertools.count(1)
        self._boot = 0
        self._suspended_until_s = 0.0
        self.standby: Standby | None = None
        self._todo: deque[do.SyncerAction] = deque()
        self._inbox: deque[tuple[float, on.SyncerEvent]] = deque()
        self._is_blocked = False  # whether the next action waits for the standby
        self._num_decided = 0  # records up to the last one that is not a commit
        self._is_restoring = False  # whether a restarted syncer waits for it
        self._payloads: dict[tuple[str, int, int], int] = {}
        self._gradients: dict[tuple[int, int], int] = {}
        self._after(tick_s, self._tick)

    # ---------------------------------------------------------------------------------------------------- from outside

    def start(self, name: str, pace: Pace) -> SimulatedLearner:
        """Start a process with this learner id."""
        learner = SimulatedLearner(name, f"{name}-{next(self._sessions)}", pace)
        self.learners[learner.session] = learner
        self._after(pace.starts_s, partial(self._say_hello, learner))
        return learner

    def kill(self, learner: SimulatedLearner) -> None:
        """Kill the process, as with kill -9."""
        learner.is_dead = True

    def cut(self, learner: SimulatedLearner) -> None:
        """Cut the network between this learner and the syncer; the process continues to train."""
        learner.is_cut = True

    def heal(self, learner: SimulatedLearner) -> None:
        """Restore the network; the process reconnects."""
        learner.is_cut = False
        self._reconnect(learner)

    def finish(self, learner: SimulatedLearner, *, drain: bool = True) -> None:
        """Stop the steps, drain and leave."""
        learner.busy_until_s = float("inf")
        self._begin_step(learner)
        self._learner_handles(learner, on.Finish("finished", drain))

    def evaluate(self, learner: SimulatedLearner, for_s: float) -> None:
        """Let the learner validate: it makes no step, lands nothing and reports that it validates."""
        learner.busy_until_s = self.now_s + for_s
        self._learner_handles(learner, on.Evaluating(True))
        self._after(for_s, partial(self._learner_handles, learner, on.Evaluating(False)))

    def stall(self, learner: SimulatedLearner, for_s: float) -> None:
        """Let the training thread hang while the link continues."""
        learner.busy_until_s = self.now_s + for_s

    def interrupt(self, learner: SimulatedLearner, for_s: float) -> None:
        """Discard the step in progress, and begin it again after this time; the link continues."""
        if learner.is_stepping:
            learner.num_interruptions += 1
            self._step_after(for_s + self._step_s(learner), learner)

    def restart_syncer(self, *, use_snapshot: bool = False, lose: int = 0) -> None:
        """Kill the syncer and restart it from its disk, which may have lost the newest `lose` records."""
        if lose:
            self.standby = None  # its copy is of another history
            self.disk.lose(lose)
            self.invariants.rolled_back()
        self._boot += 1
        self._suspended_until_s, self._is_blocked = 0.0, False
        self._num_decided = len(self.disk.log)
        for held in (self._payloads, self._todo, self._inbox):
            held.clear()
        if self.standby is not None:
            self.standby.forget()
        self._is_restoring = True  # until the standby has all records
        self._when_copied(partial(self._serve, self._boot, use_snapshot))

    def _serve(self, boot: int, use_snapshot: bool) -> None:
        if boot == self._boot:
            self._is_restoring = False
            self.syncer = self.disk.recovered(expect=self._expect, now_s=self.now_s, use_snapshot=use_snapshot)
            for learner in self.learners.values():
                self._reconnect(learner)

    def add_standby(self, delay_s: float, commit_s: float = 0.0) -> None:
        """Register a standby that has all records; see `Standby`."""
        self.standby = Standby(
            delay_s=delay_s, commit_s=commit_s, has=len(self.disk.log), after=self._after, clock=lambda: self.now_s
        )

    def continue_alone(self) -> None:
        """Let the syncer give up its standby, which may not take over any more."""
        if self.standby is not None:
            standby, self.standby = self.standby, None
            standby.give_up()

    def take_over(self) -> None:
        """Lose the syncer and its disk; the standby serves the run from the records that it has."""
        assert self.standby is not None
        num_lost, self.standby = len(self.disk.log) - self.standby.has, None
        self.disk.lose(num_lost)
        self.restart_syncer()

    @property
    def is_in_between(self) -> bool:
        """Return whether the syncer and its disk differ, because it waits for its standby."""
        versions = [f.version for f in self.syncer.rounds.fragments]
        return self._is_blocked or self._is_restoring or versions != [len(values) - 1 for values in self.disk.anchors]

    @property
    def _is_standby_behind(self) -> bool:
        return self.standby is not None and self.standby.is_awaited(len(self.disk.log))

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        """Call a function at this time, which has not passed yet."""
        self._after(at_s - self.now_s, call)

    def suspend_syncer(self, for_s: float) -> None:
        """Suspend the syncer's process: its events wait, and it notices the gap afterwards."""
        self._suspended_until_s = self.now_s + for_s
        self._after(for_s, partial(self._from_own_thread, on.StoodStill(for_s), self._boot))

    def run_until(self, until_s: float) -> None:
        """Run the simulation until this time."""
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, call = heapq.heappop(self._queue)
            call()
        self.now_s = until_s

    def run_for(self, duration_s: float) -> None:
        """Run the simulation for this long."""
        self.run_until(self.now_s + duration_s)

    def run_to_the_end(self, *, limit_s: float) -> None:
        """Run the simulation until every learner is gone; raises TimeoutError after the limit."""
        while not all(learner.is_gone for learner in self.learners.values()):
            if not self._queue or self._queue[0][0] > limit_s:
                there = [learner.session for learner in self.learners.values() if not learner.is_gone]
                raise TimeoutError(f"{there} are still there at {self.now_s:.1f} s\n{self.story()}")
            self.run_until(self._queue[0][0])

    def story(self) -> str:
        """Return the last events as text, for error messages."""
        return "\n".join(f"{at_s:9.3f} {whose} <- {event}" for at_s, whose, event in self.history)

    @property
    def participation(self) -> float:
        """Return contributors divided by learners that were stepping when the round opened, over all commits."""
        return self.syncer.rounds.counts.participation or 0.0

    # ------------------------------------------------------------------------------------------------------ machinery

    def _after(self, delay_s: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._order), call))

    def _deliver(self, call: Callable[[], None]) -> None:
        """Deliver one control message, or lose it, or deliver it twice."""
        for _ in range(2 if self.random.random() < self.network.repeats else 1):
            if self.random.random() >= self.network.loss:
                self._after(self.network.latency_s * (1 + self.network.jitter * self.random.random()), call)

    def _tick(self) -> None:
        if not self._is_restoring:
            self._syncer_handles(on.Tick())
        for learner in list(self.learners.values()):
            if learner.is_gone or not learner.connection:
                continue
            if learner.state is None:
                self._say(learner, self._hello(learner))
                continue
            if learner.boot != self._boot:
                self._reconnect(learner)
            self._learner_handles(learner, on.Tick())
            if learner.state.phase == "draining":
                self._begin_step(learner)
                self._learner_handles(learner, on.Pause(not learner.is_cut))
        self._after(self._tick_s, self._tick)

    # ------------------------------------------------------------------------------------------------------ the syncer

    def _reaches(self, learner: SimulatedLearner, boot: int) -> bool:
        """Return whether the syncer that the learner has called is there."""
        return not learner.is_cut and boot == self._boot and not self._is_restoring

    def _tell_syncer(self, learner: SimulatedLearner, event: on.SyncerEvent, boot: int) -> None:
        if self._reaches(learner, boot):
            self._syncer_handles(event)

    def _from_own_thread(self, event: on.SyncerEvent, boot: int) -> None:
        if boot == self._boot:
            self._syncer_handles(event)

    def _syncer_handles(self, event: on.SyncerEvent) -> None:
        if self.now_s < self._suspended_until_s:
            self._after(self._suspended_until_s - self.now_s, partial(self._from_own_thread, event, self._boot))
            return
        self._inbox.append((self.now_s, event))
        self._take_events()

    def _take_events(self) -> None:
        while self._inbox and not self._is_blocked:
            came_s, event = self._inbox.popleft()
            self.num_events += 1
            self.history.append((self.now_s, "syncer", event))
            with self._mortal():
                self._todo.extend(self.syncer.handle(event, came_s))
                self._carry_out()

    def _carry_out(self) -> None:
        """Carry out actions in order; after some records, the next one waits until the standby has them."""
        while self._todo:
            action = self._todo.popleft()
            self.crashes.before(action)
            self._do_for_syncer(action)
            if isinstance(action, do.Record) and action.values["kind"] not in IN_FLIGHT and self._is_standby_behind:
                self._is_blocked = True
                self._when_copied(partial(self._go_on, self._boot))
                return
        if self._is_audited:
            self.invariants.after_syncer_event()

    def _go_on(self, boot: int) -> None:
        if boot == self._boot:
            self._is_blocked = False
            with self._mortal():
                self._carry_out()
            self._take_events()

    def _when_copied(self, call: Callable[[], object], num_records: int | None = None) -> None:
        """Call a function when the standby has this number of records, or all; at once without a standby."""
        if self.standby is None:
            call()
        else:
            self.standby.wait(len(self.disk.log) if num_records is None else num_records, call)

    def _append(self, values: Json, gradient: int = 0, *, is_commit: bool = False) -> None:
        self.disk.append(values, gradient)
        if self.standby is not None:
            self.standby.send(len(self.disk.log), is_commit=is_commit)

    def _do_for_syncer(self, action: do.SyncerAction) -> None:
        boot = self._boot
        match action:
            case do.Send():
                self._when_copied(partial(self._send, action, boot), self._num_decided)
            case do.Record():
                self._append(action.values)
                self._num_decided = len(self.disk.log)
            case do.Merge():
                event = self._merge(action)
                self._gradients[action.fragment, action.round] = sum(
                    int(self._payloads[c.session, c.ready.fragment, c.ready.seq] * event.kept.get(c.session, 1.0))
                    for c in action.contributions
                )
                self._after(self.merge_s, partial(self._from_own_thread, event, boot))
            case do.Apply():
                self._after(self.merge_s, partial(self._commit, action, boot))
            case do.DropPayload():
                self._payloads.pop((action.session, action.fragment, action.seq), None)
            case do.StoreSeed():
                digests = ("start",) * self.config.fragments_wanted
                self._after(0.0, partial(self._from_own_thread, on.SeedStored(action.lease, digests), boot))
            case do.Note():
                self.notes.append((self.now_s, action))

    def _send(self, action: do.Send, boot: int) -> None:
        if boot != self._boot:
            return
        hears = partial(self._learner_hears, self.learners[action.session], action.message, boot)
        if isinstance(action.message, messages.Welcome):
            self._after(self.network.latency_s, hears)  # not lost: the hello is repeated until it arrives
        else:
            self._deliver(hears)

    def _merge(self, action: do.Merge) -> on.Merged:
        """Return the result of merging a round."""
        return on.Merged(
            action.fragment, action.round, {c.session: self._kept_by_guard() for c in action.contributions}
        )

    def _kept_by_guard(self) -> float:
        return self.random.random() if self._guard and self.random.random() < self._guard else 1.0

    def _commit(self, action: do.Apply, boot: int) -> None:
        if boot != self._boot:
            return
        if self.now_s < self._suspended_until_s:
            self._after(self._suspended_until_s - self.now_s, partial(self._commit, action, boot))
            return
        p = action.fragment
        if self.disk_is_full:
            self._syncer_handles(on.CommitFailed(p, action.round, "no space left on device"))
            return
        with self._mortal():
            self.crashes.reach("append")
            self._append(action.record, self._gradients[p, action.round], is_commit=True)
            self.crashes.reach("tell")
            committed = on.Committed(p, action.round, self.disk.digests[p][-1])
            self._when_copied(partial(self._from_own_thread, committed, boot))

    @contextmanager
    def _mortal(self) -> Iterator[None]:
        """Context for actions of the syncer that restarts it if it is killed."""
        try:
            yield
        except Killed:
            self.restart_syncer(use_snapshot=True)

    # ------------------------------------------------------------------------------------------------ learners: joining

    def _hello(self, learner: SimulatedLearner) -> messages.Hello:
        return messages.Hello(learner.name, learner.connection, PROTOCOL_VERSION, {})

    def _say_hello(self, learner: SimulatedLearner) -> None:
        learner.connection += 1
        self._say(learner, self._hello(learner))

    def _say(self, learner: SimulatedLearner, message: messages.FromLearner) -> None:
        if not learner.is_dead and not learner.is_cut:
            event = on.FromALearner(learner.session, self._over_the_wire(message))
            self._deliver(partial(self._tell_syncer, learner, event, self._boot))

    def _over_the_wire(self, message: messages.FromLearner) -> messages.FromLearner:
        """Return the message as the syncer decodes it; a long forecast skips this to save time."""
        if not self._is_audited:
            return message
        return messages.decode(messages.encode(message), messages.FromLearner)  # type: ignore[arg-type, return-value]

    def _reconnect(self, learner: SimulatedLearner) -> None:
        if learner.state is None or not learner.is_stepping or learner.is_gone or learner.is_cut:
            return
        learner.connection += 1
        learner.boot = self._boot
        known = tuple(
            messages.Mark(f.generation, f.held, learner.digests[p], f.proof)
            for p, f in enumerate(learner.state.fragments)
        )
        for action in learner.state.handle(on.Reconnected(learner.connection, known), self.now_s):
            assert isinstance(action, do.Say)
            # A real learner repeats this message until it arrives, before it sends any other.
            event = on.FromALearner(learner.session, self._over_the_wire(action.message))
            self._after(0.0, partial(self._tell_syncer, learner, event, self._boot))

    def _learner_hears(self, learner: SimulatedLearner, message: messages.FromSyncer, boot: int) -> None:
        if learner.is_gone or learner.is_cut or boot < learner.boot:
            return  # polls are answered in order, so messages of an earlier syncer are dropped
        if learner.state is not None and learner.is_stepping:
            self._learner_handles(learner, on.FromTheSyncer(message))
            return
        match message:
            case messages.SeedGrant():
                self._say(learner, messages.SeedPlan(message.lease, manifest(self.config)))
            case messages.Welcome():
                self._adopt_all(learner, message)
                confirm = messages.Confirm(message.incarnation, "digest", {}, "tokens")
                self._confirm(learner, confirm)
            case messages.Active() if learner.state is not None:
                learner.is_stepping, learner.boot = True, boot
                self._learner_handles(learner, on.FromTheSyncer(message))
                self._step_after(self._step_s(learner), learner)
            case messages.Rejected():
                learner.error = message.text

    def _confirm(self, learner: SimulatedLearner, confirm: messages.Confirm) -> None:
        if not learner.is_stepping and not learner.is_gone:
            self._say(learner, confirm)
            self._after(CONFIRM_AGAIN_S, partial(self._confirm, learner, confirm))

    def _adopt_all(self, learner: SimulatedLearner, welcome: messages.Welcome) -> None:
        """Adopt the current anchors, which may be newer than those of the welcome."""
        run = self.config
        num_fragments = run.fragments_wanted
        generation, versions = self.syncer.rounds.generation, tuple(f.version for f in self.syncer.rounds.fragments)
        learner.params = [values[v] for values, v in zip(self.disk.anchors, versions, strict=True)]
        learner.anchors = list(learner.params)
        learner.digests = [digests[v] for digests, v in zip(self.disk.digests, versions, strict=True)]
        learner.state = LearnerState(
            learner=learner.name,
            incarnation=welcome.incarnation,
            generations=(generation,) * num_fragments,
            versions=versions,
            proofs=tuple(
                self.syncer.proof(p, generation, *held)
                for p, held in enumerate(zip(versions, learner.digests, strict=True))
            ),
            due=partial(fragment_due, sync_every=run.sync_every, num_fragments=num_fragments),
            sync_every=run.sync_every,
            overlap=run.overlap,
            align=learner.pace.align,
            drain_s=learner.pace.drain_s,
            has_ranks=learner.pace.has_ranks,
        )

    # ----------------------------------------------------------------------------------------------- learners: training

    def _step_s(self, learner: SimulatedLearner) -> float:
        pace = learner.pace
        return pace.step_s * (1 + pace.jitter * (2 * self.random.random() - 1))

    def _step_after(self, delay_s: float, learner: SimulatedLearner) -> None:
        """Begin a step, and end it after this time, unless it is interrupted before."""
        self._begin_step(learner)
        num_interruptions = learner.num_interruptions
        self._after(delay_s, lambda: num_interruptions == learner.num_interruptions and self._step(learner))

    def _begin_step(self, learner: SimulatedLearner) -> None:
        if learner.pace.has_ranks:
            learner.promise = do.Promise((), ())
            self._learner_handles(learner, on.StepBegins())

    def _step(self, learner: SimulatedLearner) -> None:
        state = learner.state
        if learner.is_gone or state is None or state.phase == "draining":
            return
        if self.now_s < learner.busy_until_s:
            self._step_after(learner.busy_until_s - self.now_s, learner)
            return
        state.step_s, state.long_step_s = learner.pace.step_s, learner.pace.step_s * (1 + learner.pace.jitter)
        state.tokens_per_s = learner.pace.tokens / learner.pace.step_s
        tokens, pieces = state.tokens + learner.pace.tokens, learner.train(learner.pace.tokens)
        self._learner_handles(learner, on.StepDone(state.step + 1, tokens, pieces))
        if learner.pace.num_steps is not None and state.step >= learner.pace.num_steps:
            self.finish(learner)
        else:
            self._step_after(self._step_s(learner), learner)

    def _learner_handles(self, learner: SimulatedLearner, event: on.LearnerEvent) -> None:
        if learner.is_gone or learner.state is None:
            return
        self.num_events += 1
        self.history.append((self.now_s, learner.session, event))
        todo = learner.state.handle(event, self.now_s)
        for action in todo:
            self._do_for_learner(learner, action)
        if self._is_audited:
            self.invariants.after_learner_event(learner, event, todo)

    def _do_for_learner(self, learner: SimulatedLearner, action: do.LearnerAction) -> None:
        match action:
            case do.Say():
                self._say(learner, action.message)
            case do.Snapshot():
                learner.snapshot(action.ready.fragment, action.ready.seq)
                encoded = on.Encoded(action.ready.fragment, action.ready.seq)
                self._after(0.0, partial(self._learner_handles, learner, encoded))
            case do.Upload():
                takes_s = self.network.upload_s * learner.pace.upload_factor * (0.9 + 0.2 * self.random.random())
                self._after(takes_s, partial(self._upload_arrives, learner, action.ready, self._boot))
            case do.Fetch():
                self._after(self.network.download_s, partial(self._fetched, learner, action, self._boot))
            case do.Land():
                assert learner.state is not None
                learner.land(action.fragment)
                learner.landings.append((action.fragment, learner.state.fragments[action.fragment].landed))
            case do.Promise():
                learner.promise = action
            case do.Forget():
                learner.kept.pop((action.fragment, action.seq), None)
            case do.Fail():
                learner.error = action.text
            case do.SayHello():
                self._after(0.0, partial(self._reconnect, learner))
            case do.Left():
                learner.is_last = action.is_last

    def _upload_arrives(self, learner: SimulatedLearner, ready: messages.Ready, boot: int) -> None:
        if learner.is_dead:
            return
        p, seq = ready.fragment, ready.seq
        if not self._reaches(learner, boot):
            self._learner_handles(learner, on.UploadFailed(p, seq))
            return
        error, learner.bad_payload = ("scales are not finite" if learner.bad_payload else None), False
        if (p, seq) in learner.kept:
            if error is None:
                self._payloads[learner.session, p, seq] = learner.kept[p, seq]
            self._syncer_handles(on.PayloadReceived(learner.session, ready, error))
        self._learner_handles(learner, on.Uploaded(p, seq))

    def _fetched(self, learner: SimulatedLearner, action: do.Fetch, boot: int) -> None:
        p = action.fragment
        member = self.syncer.roster.get(learner.session)
        if not self._reaches(learner, boot) or member is None:
            self._learner_handles(learner, on.FetchFailed(p))
            return
        generation, version = self.syncer.rounds.generation, self.syncer.rounds.fragments[p].version
        fate = member.fates.get(p)
        merged_seq = fate[0] if fate and fate[1] == "merged" else None
        sent = learner.kept.get((p, merged_seq)) if merged_seq is not None else None
        kept = fate[4] if fate else 1.0
        have = None if action.adopt or generation != action.generation else action.have
        update = self.disk.update(p, have, version, int((sent or 0) * kept))
        learner.staged[p], learner.adopts[p] = (update, self.disk.digests[p][version]), action.adopt
        seq = None if sent is None else merged_seq
        proof = self.syncer.proof(p, generation, version, self.disk.digests[p][version])
        self._learner_handles(learner, on.Staged(p, generation, version, seq, update.full is not None, kept, proof))
