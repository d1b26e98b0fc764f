"""A fleet in one process: the real machines, a fake clock, a network that delays, loses and repeats.

1. Nothing of the protocol is rebuilt here: learners are `LearnerState`, the syncer is `SyncerState`.
2. Time is simulated, randomness seeded: the same arguments give the same history.
3. After every event the invariants are checked; a violation carries the last events before it.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from lightning_diloco.config import PROTOCOL_VERSION, RunConfig
from lightning_diloco.core.schedule import fragment_due
from lightning_diloco.protocol import LearnerState, SyncerState, messages, records
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol.codec import Json

TICK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How messages and payloads travel.

    Args:
        latency_s: one way, for control messages.
        upload_s, download_s: for one fragment.
        loss, repeats: probability that a control message vanishes, or arrives twice.
        jitter: messages are delayed by up to this many latencies more, so they may overtake each other.
    """

    latency_s: float = 0.001
    upload_s: float = 0.05
    download_s: float = 0.05
    loss: float = 0.0
    repeats: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast one learner goes.

    Args:
        step_s: seconds per inner step.
        jitter: steps vary uniformly by this fraction of step_s.
        tokens: per step.
        starts_s: when the process starts.
        num_steps: it finishes after these; None: it goes on.
    """

    step_s: float = 1.0
    jitter: float = 0.0
    tokens: int = 100
    starts_s: float = 0.0
    num_steps: int | None = None


@dataclass(slots=True)
class SimulatedLearner:
    """One process: a machine once it has joined, and what its threads would hold."""

    name: str
    session: str
    pace: Pace
    state: LearnerState | None = None
    is_stepping: bool = False
    is_cut: bool = False
    is_dead: bool = False
    connection: int = 0
    error: str | None = None
    is_last: bool | None = None
    landings: list[tuple[int, int]] = field(default_factory=list)


class Fleet:
    """Runs learners and a syncer against each other.

    Args:
        config: of the run; `num_fragments` decides P.
        network: how messages travel.
        merge_s: time the syncer takes for one merge, and for one commit.
        seed: of all randomness.
        expect: learners the start waits for.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        network: Network | None = None,
        merge_s: float = 0.01,
        seed: int = 0,
        expect: int | None = None,
    ) -> None:
        self.config = config.validate()
        self.network = network or Network()
        self.merge_s = merge_s
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.syncer = SyncerState(run="simulated", expect=expect)
        self.learners: dict[str, SimulatedLearner] = {}
        self.log: list[Json] = []
        self.notes: list[tuple[float, do.Note]] = []
        self.history: deque[str] = deque(maxlen=60)
        self._expect = expect
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._sessions = itertools.count(1)
        self._boot = 0
        self._versions: list[int] = []
        self._after(TICK_S, self._tick)

    # ---------------------------------------------------------------------------------------------------- from outside

    def start(self, name: str, pace: Pace) -> SimulatedLearner:
        """Start a process under this learner id; an older one under the same id should be killed first."""
        learner = SimulatedLearner(name, f"{name}-{next(self._sessions)}", pace)
        self.learners[learner.session] = learner
        self._after(pace.starts_s, partial(self._say_hello, learner))
        return learner

    def kill(self, learner: SimulatedLearner) -> None:
        """kill -9."""
        learner.is_dead = True

    def cut(self, learner: SimulatedLearner) -> None:
        """The network between this learner and the syncer fails; the process trains on."""
        learner.is_cut = True

    def heal(self, learner: SimulatedLearner) -> None:
        """The network is back; the process reconnects."""
        learner.is_cut = False
        self._reconnect(learner)

    def restart_syncer(self) -> None:
        """kill -9 of the syncer and a restart from its log: only durable state is left."""
        self._boot += 1
        self.syncer = recovered(self.log, expect=self._expect, now_s=self.now_s)
        for learner in self.learners.values():
            self._reconnect(learner)

    def run_until(self, until_s: float) -> None:
        """Let time pass."""
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, call = heapq.heappop(self._queue)
            call()
        self.now_s = until_s

    def run_to_the_end(self, *, limit_s: float) -> None:
        """Let time pass until every learner has left; raises TimeoutError past the limit."""
        while any(not (x.is_dead or x.is_last is not None or x.error) for x in self.learners.values()):
            if not self._queue or self._queue[0][0] > limit_s:
                raise TimeoutError(f"learners are still there at {self.now_s:.1f} s:\n" + "\n".join(self.history))
            self.run_until(self._queue[0][0])

    # ------------------------------------------------------------------------------------------------------ machinery

    def _after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._order), call))

    def _deliver(self, call: Callable[[], None]) -> None:
        """Carry one control message, or lose it, or bring it twice."""
        for _ in range(2 if self.random.random() < self.network.repeats else 1):
            if self.random.random() >= self.network.loss:
                self._after(self.network.latency_s * (1 + self.network.jitter * self.random.random()), call)

    def _tell_syncer(self, learner: SimulatedLearner, event: on.SyncerEvent, boot: int) -> None:
        if not learner.is_cut and boot == self._boot:
            self._syncer_handles(event)

    def _syncer_handles(self, event: on.SyncerEvent) -> None:
        self.history.append(f"{self.now_s:8.3f} syncer <- {event}")
        for action in self.syncer.handle(event, self.now_s):
            self._do_for_syncer(action)
        self._check()

    def _do_for_syncer(self, action: do.SyncerAction) -> None:
        boot = self._boot
        match action:
            case do.Send():
                learner = self.learners[action.session]
                self._deliver(partial(self._learner_hears, learner, action.message))
            case do.Record():
                self.log.append(action.values)
            case do.Merge():
                event: on.SyncerEvent = on.Merged(action.fragment, action.round)
                self._after(self.merge_s, partial(self._from_own_thread, event, boot))
            case do.Apply():
                self._after(self.merge_s, partial(self._commit, action, boot))
            case do.StoreSeed():
                digests = ("start",) * self.config.fragments_wanted
                self._after(0.0, partial(self._from_own_thread, on.SeedStored(action.lease, digests), boot))
            case do.Note():
                self.notes.append((self.now_s, action))

    def _from_own_thread(self, event: on.SyncerEvent, boot: int) -> None:
        if boot == self._boot:
            self._syncer_handles(event)

    def _commit(self, action: do.Apply, boot: int) -> None:
        if boot == self._boot:
            self.log.append(action.record)
            digest = f"{action.fragment}@{action.record['version']}"
            self._syncer_handles(on.Committed(action.fragment, action.round, digest))

    def _tick(self) -> None:
        self._syncer_handles(on.Tick())
        for learner in list(self.learners.values()):
            if not learner.is_dead and learner.state is not None:
                self._learner_handles(learner, on.Tick())
                if learner.state.phase == "draining":
                    self._learner_handles(learner, on.Pause())
            elif not learner.is_dead and not learner.error and learner.connection:
                self._say(learner, self._hello(learner))
        self._after(TICK_S, self._tick)

    # -------------------------------------------------------------------------------------------------------- learners

    def _hello(self, learner: SimulatedLearner) -> messages.Hello:
        return messages.Hello(learner.name, learner.connection, PROTOCOL_VERSION, {})

    def _say_hello(self, learner: SimulatedLearner) -> None:
        learner.connection += 1
        self._say(learner, self._hello(learner))

    def _say(self, learner: SimulatedLearner, message: messages.FromLearner) -> None:
        if not learner.is_dead and not learner.is_cut:
            event = on.FromALearner(learner.session, _over_the_wire(message, messages.FromLearner))
            self._deliver(partial(self._tell_syncer, learner, event, self._boot))

    def _reconnect(self, learner: SimulatedLearner) -> None:
        if learner.state is None or learner.is_dead or learner.is_cut or learner.is_last is not None:
            return
        learner.connection += 1
        known = tuple(
            messages.Mark(f.generation, f.landed, "start" if f.landed == 0 else f"{p}@{f.landed}")
            for p, f in enumerate(learner.state.fragments)
        )
        self._learner_handles(learner, on.Reconnected(learner.connection, known))

    def _learner_hears(self, learner: SimulatedLearner, message: messages.FromSyncer) -> None:
        if learner.is_dead or learner.is_cut or learner.error:
            return
        message = _over_the_wire(message, messages.FromSyncer)
        if learner.state is not None and learner.is_stepping:
            self._learner_handles(learner, on.FromTheSyncer(message))
            return
        match message:
            case messages.SeedGrant():
                self._say(learner, messages.SeedPlan(message.lease, self._manifest()))
            case messages.Welcome():
                learner.state = self._machine(learner, message)
                confirm = messages.Confirm(message.incarnation, "digest", {}, "tokens")
                self._say(learner, confirm)
                self._after(0.5, partial(self._confirm_again, learner, confirm))
            case messages.Active() if learner.state is not None and not learner.is_stepping:
                learner.is_stepping = True
                self._learner_handles(learner, on.FromTheSyncer(message))
                self._after(self._step_s(learner), partial(self._step, learner))
            case messages.Rejected():
                learner.error = message.text

    def _confirm_again(self, learner: SimulatedLearner, confirm: messages.Confirm) -> None:
        if not learner.is_stepping and not learner.is_dead:
            self._say(learner, confirm)
            self._after(0.5, partial(self._confirm_again, learner, confirm))

    def _machine(self, learner: SimulatedLearner, welcome: messages.Welcome) -> LearnerState:
        return LearnerState(
            learner=learner.name,
            incarnation=welcome.incarnation,
            generations=welcome.generations,
            versions=welcome.versions,
            due=partial(
                fragment_due, sync_every=self.config.sync_every, num_fragments=self.config.fragments_wanted
            ),
            sync_every=self.config.sync_every,
            overlap=self.config.overlap,
        )

    def _manifest(self) -> Json:
        return {
            "config": self.config.to_dict(),
            "num_fragments": self.config.fragments_wanted,
            "plan_digest": "digest",
            "frozen": {},
            "token_unit": "tokens",
        }

    def _step_s(self, learner: SimulatedLearner) -> float:
        pace = learner.pace
        return pace.step_s * (1 + pace.jitter * (2 * self.random.random() - 1))

    def _step(self, learner: SimulatedLearner) -> None:
        state = learner.state
        if learner.is_dead or learner.error or state is None:
            return
        state.step_s = learner.pace.step_s
        state.tokens_per_s = learner.pace.tokens / learner.pace.step_s
        self._learner_handles(learner, on.StepDone(state.step + 1, state.tokens + learner.pace.tokens))
        if learner.pace.num_steps is not None and state.step >= learner.pace.num_steps:
            self._learner_handles(learner, on.Finish("finished"))
        else:
            self._after(self._step_s(learner), partial(self._step, learner))

    def _learner_handles(self, learner: SimulatedLearner, event: on.LearnerEvent) -> None:
        if learner.is_dead or learner.state is None:
            return
        self.history.append(f"{self.now_s:8.3f} {learner.session} <- {event}")
        for action in learner.state.handle(event, self.now_s):
            self._do_for_learner(learner, action)

    def _do_for_learner(self, learner: SimulatedLearner, action: do.LearnerAction) -> None:
        match action:
            case do.Say():
                message = action.message
                if isinstance(message, messages.Hello):
                    message = dataclasses.replace(message, protocol=PROTOCOL_VERSION)
                self._say(learner, message)
            case do.Snapshot():
                encoded = on.Encoded(action.ready.fragment, action.ready.seq)
                self._after(0.0, partial(self._learner_handles, learner, encoded))
            case do.Upload():
                arrives = self.network.upload_s * (0.9 + 0.2 * self.random.random())
                self._after(arrives, partial(self._upload_arrives, learner, action.ready, self._boot))
            case do.Fetch():
                self._after(self.network.download_s, partial(self._fetched, learner, action, self._boot))
            case do.Land():
                assert learner.state is not None
                learner.landings.append((action.fragment, learner.state.fragments[action.fragment].landed))
            case do.Fail():
                learner.error = action.text
            case do.Left():
                learner.is_last = action.is_last

    def _upload_arrives(self, learner: SimulatedLearner, ready: messages.Ready, boot: int) -> None:
        if learner.is_dead:
            return
        if learner.is_cut or boot != self._boot:
            self._learner_handles(learner, on.UploadFailed(ready.fragment, ready.seq))
            return
        self._syncer_handles(on.PayloadReceived(learner.session, ready))
        self._learner_handles(learner, on.Uploaded(ready.fragment, ready.seq))

    def _fetched(self, learner: SimulatedLearner, action: do.Fetch, boot: int) -> None:
        p = action.fragment
        if learner.is_cut or boot != self._boot:
            self._learner_handles(learner, on.FetchFailed(p))
            return
        version = self.syncer.rounds.fragments[p].version
        fate = self.syncer.roster[learner.session].fates.get(p)
        merged_seq = fate[0] if fate and fate[1] == "merged" and (fate[2] or 0) <= version else None
        generation = self.syncer.rounds.generation
        is_full = action.adopt or version - action.have > 3 or generation != action.generation
        self._learner_handles(learner, on.Staged(p, generation, version, merged_seq, is_full))

    # ------------------------------------------------------------------------------------------------------ invariants

    def _check(self) -> None:
        versions = [f.version for f in self.syncer.rounds.fragments]
        problems = []
        if any(new < old for new, old in zip(versions, self._versions, strict=False)):
            problems.append(f"versions went from {self._versions} to {versions}")
        if self.syncer.num_inexact:
            problems.append("a learner's books disagree with the commits it has landed")
        self._versions = versions
        if problems:
            raise AssertionError("; ".join(problems) + "\n" + "\n".join(self.history))

    @property
    def participation(self) -> float:
        """Contributors per learner that was stepping when the round opened, over all commits."""
        return self.syncer.rounds.counts.participation or 0.0


def recovered(log: list[Json], *, expect: int | None, now_s: float) -> SyncerState:
    """A machine with nothing but what its log says."""
    state = SyncerState(run="simulated", expect=expect)
    for values in log:
        state.apply(records.decode(values))
    for p, f in enumerate(state.rounds.fragments):
        f.digests[f.version] = "start" if f.version == 0 else f"{p}@{f.version}"
    state.resume(now_s)
    return state


def _over_the_wire(message: object, allowed: object) -> messages.FromLearner | messages.FromSyncer:
    return messages.decode(messages.encode(message), allowed)  # type: ignore[arg-type]
