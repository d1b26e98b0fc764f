"""A simulated fleet in one process, whose network delays, loses and repeats messages.

1. Learners and syncer use the real state machines, `LearnerState` and `SyncerState`.
2. Time is simulated and randomness is seeded. The same arguments give the same history.
3. The invariants are checked after every event (`invariants.py`). A violation reports the last events before it.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_diloco.config import PROTOCOL_VERSION, RunConfig
from lightning_diloco.core.schedule import fragment_due
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.learner.machine import LearnerState
from lightning_diloco.simulate.crashes import CrashPoints
from lightning_diloco.simulate.invariants import Invariants
from lightning_diloco.simulate.learner import SimulatedLearner, Update
from lightning_diloco.simulate.settings import Network, Pace, manifest
from lightning_diloco.simulate.syncer import SimulatedSyncer
from lightning_diloco.simulate.timeline import Timeline

TICK_S = 0.25
CONFIRM_AGAIN_S = 0.5
FULL_VALUES = 4  # float32, in updates of one byte per parameter


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
        self.random = random.Random(seed)
        self.learners: dict[str, SimulatedLearner] = {}
        self.history: deque[tuple[float, str, object]] = deque(maxlen=80)
        self.num_events = 0
        self.invariants = Invariants(self)
        self._is_audited = is_audited
        self._tick_s = tick_s
        self._timeline = Timeline()
        self._after = self._timeline.after
        self._proofs: dict[int, tuple[tuple[int, int, int, str], str]] = {}  # by fragment: its version, and the proof
        self._sessions = itertools.count(1)
        self.syncer = self._made_syncer(
            expect=expect, merge_s=merge_s, crashes=crashes, guard=guard, keeps_log=is_audited
        )
        self._after(tick_s, self._tick)

    def _made_syncer(self, **options: Any) -> SimulatedSyncer:
        """Make the syncer; see `SimulatedSyncer` for the options."""
        return SimulatedSyncer(self, self.config, self._timeline, self.random, **options)

    @property
    def now_s(self) -> float:
        """Current simulated time."""
        return self._timeline.now_s

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
        learner.is_cut = learner.is_deaf = False
        learner.connected_s = self.now_s
        self._reconnect(learner)

    def finish(self, learner: SimulatedLearner, *, drain: bool = True, within_s: float | None = None) -> None:
        """Stop the steps, drain and leave; the drain takes at most `within_s`, by default that of the pace."""
        learner.busy_until_s = float("inf")
        self._begin_step(learner)
        self._learner_handles(learner, on.Finish("finished", drain, within_s))

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

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        """Call a function at this time, which has not passed yet."""
        self._after(at_s - self.now_s, call)

    def run_until(self, until_s: float) -> None:
        """Run the simulation until this time."""
        self._timeline.run_until(until_s)

    def run_for(self, duration_s: float) -> None:
        """Run the simulation for this long."""
        self.run_until(self.now_s + duration_s)

    def run_to_the_end(self, *, limit_s: float) -> None:
        """Run the simulation until every learner is gone; raises TimeoutError after the limit."""
        while not all(learner.is_gone for learner in self.learners.values()):
            next_s = self._timeline.next_s
            if next_s is None or next_s > limit_s:
                there = [learner.session for learner in self.learners.values() if not learner.is_gone]
                raise TimeoutError(f"{there} are still there at {self.now_s:.1f} s\n{self.story()}")
            self.run_until(next_s)

    def story(self) -> str:
        """Return the last events as text, for error messages."""
        return "\n".join(f"{at_s:9.3f} {whose} <- {event}" for at_s, whose, event in self.history)

    @property
    def participation(self) -> float:
        """Return contributors divided by learners that were stepping when the round opened, over all commits."""
        return self.syncer.state.rounds.counts.participation or 0.0

    # ------------------------------------------------------------------------------------------------------ machinery

    def _deliver(self, call: Callable[[], None]) -> None:
        """Deliver one control message, or lose it, or deliver it twice."""
        network, chance = self.network, self.random.random
        for _ in range(2 if chance() < network.repeats else 1):
            if chance() >= network.loss:
                self._after(network.latency_s * (1 + network.jitter * chance()), call)

    def _tick(self) -> None:
        self.syncer.tick()
        for learner in list(self.learners.values()):
            if learner.is_gone or not learner.connection:
                continue
            if learner.state is None:
                self._say(learner, self._hello(learner))
                continue
            if learner.boot != self.syncer.boot:
                self._reconnect(learner)
            self._learner_handles(learner, on.Tick())
            if learner.state.phase == "draining":
                self._begin_step(learner)
                self._learner_handles(learner, on.Pause(not learner.is_cut))
        self._after(self._tick_s, self._tick)

    # ------------------------------------------------------------------------------------------- around the syncer

    def deliver(self, session: str, message: messages.FromSyncer, boot: int) -> None:
        """See `World`."""
        hears = partial(self._learner_hears, self.learners[session], message, boot)
        if isinstance(message, messages.Welcome):
            self._after(self.network.latency_s, hears)  # not lost: the hello is repeated until it arrives
        else:
            self._deliver(hears)

    def reconnect(self) -> None:
        """See `World`."""
        for learner in self.learners.values():
            self._reconnect(learner)

    def saw(self, whose: str, event: object) -> None:
        """See `World`."""
        self.num_events += 1
        if self._is_audited and not isinstance(event, on.Tick):
            self.history.append((self._timeline.now_s, whose, event))

    def audit(self) -> None:
        """See `World`."""
        if self._is_audited:
            self.invariants.after_syncer_event()

    def rolled_back(self) -> None:
        """See `World`."""
        self.invariants.rolled_back()

    def _reaches(self, learner: SimulatedLearner, boot: int) -> bool:
        """Return whether the syncer process that the learner has called still exists."""
        return not learner.is_cut and self.syncer.is_there(boot)

    def _tell_syncer(self, learner: SimulatedLearner, event: on.SyncerEvent, boot: int) -> None:
        if self._reaches(learner, boot):
            self.syncer.handle(event)

    # ------------------------------------------------------------------------------------------------ learners: joining

    def _hello(self, learner: SimulatedLearner) -> messages.Hello:
        return messages.Hello(learner.name, learner.connection, PROTOCOL_VERSION, {})

    def _say_hello(self, learner: SimulatedLearner) -> None:
        learner.connection += 1
        self._say(learner, self._hello(learner))

    def _say(self, learner: SimulatedLearner, message: messages.FromLearner) -> None:
        if not learner.is_dead and not learner.is_cut:
            event = on.FromALearner(learner.session, self._over_the_wire(message))
            self._deliver(partial(self._tell_syncer, learner, event, self.syncer.boot))

    def _over_the_wire(self, message: messages.FromLearner) -> messages.FromLearner:
        """Return the message as the syncer decodes it; a long forecast skips this to save time."""
        if not self._is_audited:
            return message
        return messages.decode(messages.encode(message), messages.FromLearner)  # type: ignore[arg-type, return-value]

    def _reconnect(self, learner: SimulatedLearner) -> None:
        if learner.state is None or not learner.is_stepping or learner.is_gone or learner.is_cut:
            return
        learner.connection += 1
        learner.boot = self.syncer.boot
        known = tuple(
            messages.Mark(f.generation, f.held, learner.digests[p], f.proof)
            for p, f in enumerate(learner.state.fragments)
        )
        for action in learner.state.handle(on.Reconnected(learner.connection, known), self.now_s):
            assert isinstance(action, do.Say)
            # A real learner repeats this message until it arrives, before it sends any other.
            event = on.FromALearner(learner.session, self._over_the_wire(action.message))
            self._after(0.0, partial(self._tell_syncer, learner, event, self.syncer.boot))

    def _learner_hears(self, learner: SimulatedLearner, message: messages.FromSyncer, boot: int) -> None:
        if learner.is_gone or learner.is_cut or learner.is_deaf or boot < learner.boot:
            return  # polls are answered in order, so messages of an earlier syncer process are dropped
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
        rounds, disk = self.syncer.state.rounds, self.syncer.disk
        generation, versions = rounds.generation, tuple(f.version for f in rounds.fragments)
        learner.params = [values[v] for values, v in zip(disk.anchors, versions, strict=True)]
        learner.anchors = list(learner.params)
        learner.digests = [digests[v] for digests, v in zip(disk.digests, versions, strict=True)]
        learner.state = LearnerState(
            learner=learner.name,
            incarnation=welcome.incarnation,
            generations=(generation,) * num_fragments,
            versions=versions,
            proofs=tuple(
                self.syncer.state.proof(p, generation, *held)
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
        self.saw(learner.session, event)
        todo = learner.state.handle(event, self._timeline.now_s)
        for action in todo:
            if learner.dies_in is not None:
                if learner.dies_in == 0:
                    self.kill(learner)
                    return
                learner.dies_in -= 1
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
                learner.uploads_until_s = max(self.now_s, learner.uploads_until_s) + takes_s
                arrives = partial(self._upload_arrives, learner, action.ready, self.syncer.boot)
                self._after(learner.uploads_until_s - self.now_s, arrives)
            case do.Fetch():
                learner.fetches.append(action)
                self._fetch_next(learner)
            case do.Land():
                assert learner.state is not None
                learner.land(action.fragment)
                if self._is_audited:
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
        if not self._reaches(learner, boot) or self.syncer.is_away(p):
            self._learner_handles(learner, on.UploadFailed(p, seq))
            return
        error, learner.bad_payload = ("scales are not finite" if learner.bad_payload else None), False
        if (p, seq) in learner.kept:
            if error is None:
                self.syncer.payloads[learner.session, p, seq] = learner.kept[p, seq]
            self.syncer.handle(on.PayloadReceived(learner.session, ready, error))
        self._learner_handles(learner, (on.UploadFailed if learner.is_deaf else on.Uploaded)(p, seq))

    def _fetch_next(self, learner: SimulatedLearner) -> None:
        """Begin the next download, if none is in progress. It has the version that is current when it begins."""
        if learner.is_fetching or not learner.fetches:
            return
        learner.is_fetching = True
        action, boot = learner.fetches.popleft(), self.syncer.boot
        p, member = action.fragment, self.syncer.state.roster.get(learner.session)
        if not self._reaches(learner, boot) or member is None or self.syncer.is_away(p):
            self._after(self.network.download_s, partial(self._fetched, learner, action, None, boot))
            return
        self._fetch_begins(learner, action)
        rounds, disk = self.syncer.state.rounds, self.syncer.disk
        generation, version = rounds.generation, rounds.fragments[p].version
        fate = member.fates.get(p)
        merged_seq = fate[0] if fate and fate[1] == "merged" else None
        sent = learner.kept.get((p, merged_seq)) if merged_seq is not None else None
        kept = fate[4] if fate else 1.0
        have = None if action.adopt or generation != action.generation else action.have
        update, digest = disk.update(p, have, version, int((sent or 0) * kept)), disk.digests[p][version]
        is_full = update.full is not None
        proof = self._proof(p, generation, version, digest)
        staged = on.Staged(p, generation, version, None if sent is None else merged_seq, is_full, kept, proof)
        takes_s = self.network.download_s * (FULL_VALUES if is_full else max(1, version - action.have))
        self._after(takes_s, partial(self._fetched, learner, action, (update, digest, staged), boot))

    def _proof(self, p: int, generation: int, version: int, digest: str) -> str:
        """Return the proof of a version, computed once for all learners that fetch it."""
        key = p, generation, version, digest
        if p not in self._proofs or self._proofs[p][0] != key:
            self._proofs[p] = key, self.syncer.state.proof(*key)
        return self._proofs[p][1]

    def _fetch_begins(self, learner: SimulatedLearner, action: do.Fetch) -> None:
        """Do nothing; a fleet with real tensors overrides this to get the update."""

    def _fetched(
        self, learner: SimulatedLearner, action: do.Fetch, found: tuple[Update, str, on.Staged] | None, boot: int
    ) -> None:
        p, learner.is_fetching = action.fragment, False
        if found is None or learner.is_deaf or not self._reaches(learner, boot):
            self._learner_handles(learner, on.FetchFailed(p))
        else:
            update, digest, staged = found
            learner.staged[p], learner.adopts[p] = (update, digest), action.adopt
            self._learner_handles(learner, staged)
        self._fetch_next(learner)
