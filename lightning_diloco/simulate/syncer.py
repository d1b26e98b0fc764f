"""The process of a simulated syncer: its state machine, its disk and its standby.

1. It carries out the actions of the state machine in order, as `syncer/service.py` does. After a record that changes
   the fleet, it waits until its standby has it.
2. It may be killed between any two of its actions (`crashes.py`), suspended, or replaced by its standby.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from lightning_diloco.config import RunConfig
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.codec import Json
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.protocol.syncer.succession import IN_FLIGHT
from lightning_diloco.simulate.crashes import CrashPoints, Killed
from lightning_diloco.simulate.disk import Disk
from lightning_diloco.simulate.standby import Standby
from lightning_diloco.simulate.timeline import Timeline

NUM_NOTES_KEPT = 1000


class World(Protocol):
    """The environment of a simulated syncer."""

    def deliver(self, session: str, message: messages.FromSyncer, boot: int) -> None:
        """Deliver a message to a learner."""

    def reconnect(self) -> None:
        """Make learners reconnect to a restarted syncer."""

    def saw(self, whose: str, event: object) -> None:
        """Record an event that is handled now."""

    def audit(self) -> None:
        """Check the syncer after an event."""

    def rolled_back(self) -> None:
        """Record that the disk has lost records."""


class SimulatedSyncer:
    """A simulated syncer.

    Args:
        world: its environment.
        config: the run's config.
        timeline: simulated time.
        chance: source of randomness.
        expect: number of learners that the first step waits for; None: it does not wait.
        merge_s: duration of one merge, and of one commit.
        crashes: points where it is killed; it restarts immediately.
        guard: probability that the norm guard scales a contribution down.
        keeps_log: keep all records and notes; otherwise it cannot restart.

    Attributes:
        state: the state machine of the present process.
        event_came_s: when the event that is handled now, or was handled last, arrived.
        boot: number of restarts.
        payloads: contributions that have arrived, by session, fragment and seq.
        standby: its standby; None: it has none.
        disk_is_full: no commit can be written.
        shard_dies_at: the shard dies during its next action of this kind; None: it does not die.
        on_commit: called with the ids of the contributors of each commit.
    """

    def __init__(
        self,
        world: World,
        config: RunConfig,
        timeline: Timeline,
        chance: random.Random,
        *,
        expect: int | None,
        merge_s: float,
        crashes: CrashPoints | None,
        guard: float,
        keeps_log: bool,
    ) -> None:
        self.state = SyncerState(run="simulated", expect=expect, secret="simulated")
        self.disk = Disk(keeps_log=keeps_log)
        self.disk_is_full = False
        self.shard_dies_at: type[do.Merge | do.Apply] | None = None
        self.standby: Standby | None = None
        self.crashes = crashes or CrashPoints()
        assert keeps_log or crashes is None, "a syncer that keeps no log cannot restart"
        self._may_die = keeps_log
        self.on_commit: Callable[[Sequence[str]], object] = lambda learners: None
        self.notes: deque[tuple[float, do.Note]] = deque(maxlen=None if keeps_log else NUM_NOTES_KEPT)
        self.payloads: dict[tuple[str, int, int], int] = {}
        self.boot = 0
        self.event_came_s = 0.0
        self._world, self._config, self._timeline, self._chance = world, config, timeline, chance
        self._expect, self._merge_s, self.guard = expect, merge_s, guard
        self._gradients: dict[tuple[int, int], int] = {}
        self._num_lost: Counter[int] = Counter()  # number of restarts of its shard, by fragment
        self._away_until_s: dict[int, float] = {}  # by fragment
        self._inbox: deque[tuple[float, on.SyncerEvent]] = deque()
        self._todo: deque[do.SyncerAction] = deque()
        self._waiting: deque[Callable[[], object]] = deque()  # what came while it was suspended
        self._suspended_at_s = self._suspended_until_s = 0.0
        self._is_blocked = False  # whether the next action waits for the standby
        self._is_restoring = False  # whether a restarted syncer waits for it
        self._num_decided = 0  # records up to the last one that is not a commit

    # ---------------------------------------------------------------------------------------------------- from outside

    def is_there(self, boot: int) -> bool:
        """Return whether the process with this number is running."""
        return boot == self.boot and not self._is_restoring

    def handle(self, event: on.SyncerEvent) -> None:
        """Handle an event, now or when the process is no longer suspended."""
        if self._is_suspended:
            self._waiting.append(partial(self.handle, event))
            return
        self._inbox.append((self._timeline.now_s, event))
        self._take_events()

    def tick(self) -> None:
        """Let time pass for the state machine."""
        if not self._is_restoring:
            self.handle(on.Tick())

    def suspend(self, for_s: float) -> None:
        """Suspend the process, or longer: its events wait in order, and it notices the gap afterwards."""
        now_s = self._timeline.now_s
        if not self._is_suspended:
            self._suspended_at_s = now_s
        self._suspended_until_s = max(self._suspended_until_s, now_s + for_s)
        self._timeline.after(for_s, partial(self._resume, self.boot))

    def _resume(self, boot: int) -> None:
        if boot != self.boot or self._is_suspended:
            return
        self._waiting.appendleft(partial(self.handle, on.StoodStill(self._timeline.now_s - self._suspended_at_s)))
        while self._waiting:  # a restart empties it
            self._waiting.popleft()()

    @property
    def _is_suspended(self) -> bool:
        return self._timeline.now_s < self._suspended_until_s

    def restart(self, *, use_snapshot: bool = False, lose: int = 0) -> None:
        """Kill the process and restart it from its disk, which may have lost the newest `lose` records."""
        if lose:
            self.standby = None  # the standby's copy belongs to another history
            self.disk.lose(lose)
            self._world.rolled_back()
        self.boot += 1
        self._suspended_until_s, self._is_blocked = 0.0, False
        self._num_decided = len(self.disk.log)
        for held in (self.payloads, self._todo, self._inbox, self._waiting):
            held.clear()
        if self.standby is not None:
            self.standby.forget()
        self._is_restoring = True  # until the standby has all records
        self._when_copied(partial(self._serve, self.boot, use_snapshot))

    def _serve(self, boot: int, use_snapshot: bool) -> None:
        if boot == self.boot:
            self._is_restoring = False
            now_s = self._timeline.now_s
            self.state = self.disk.recovered(expect=self._expect, now_s=now_s, use_snapshot=use_snapshot)
            self._world.reconnect()

    def restart_shard(self, part: tuple[int, int] = (1, 2), away_s: float = 0.0) -> None:
        """Kill the process of a shard, and start it again: it has lost all payloads.

        Args:
            part: (k, S) for shard k of S, which has the fragments p with p mod S = k.
            away_s: time until it works again.
        """
        self.shard_dies_at = None
        lost = tuple(range(part[0], len(self.state.rounds.fragments), part[1]))
        for p in lost:
            self._num_lost[p] += 1
        self.payloads = {key: value for key, value in self.payloads.items() if key[1] not in lost}
        self._gradients = {key: value for key, value in self._gradients.items() if key[0] not in lost}
        if away_s:
            self._away_until_s |= dict.fromkeys(lost, self._timeline.now_s + away_s)
            self._timeline.after(away_s, partial(self._handle_own, on.PayloadsLost(lost), self.boot))
        else:
            self.handle(on.PayloadsLost(lost))

    def is_away(self, p: int) -> bool:
        """Return whether the shard with this fragment is away."""
        return self._timeline.now_s < self._away_until_s.get(p, 0.0)

    def add_standby(self, delay_s: float, commit_s: float = 0.0) -> None:
        """Register a standby that has all records; see `Standby`."""
        self.standby = Standby(delay_s=delay_s, commit_s=commit_s, has=len(self.disk.log), timeline=self._timeline)

    def continue_alone(self) -> None:
        """Give up the standby, which may no longer take over."""
        if self.standby is not None:
            standby, self.standby = self.standby, None
            standby.give_up()

    def take_over(self) -> None:
        """Lose the process and its disk; the standby serves the run from the records that it has."""
        assert self.standby is not None
        num_lost, self.standby = len(self.disk.log) - self.standby.has, None
        self.disk.lose(num_lost)
        self.restart()

    @property
    def is_in_between(self) -> bool:
        """Return whether process and disk differ, because the syncer waits for its standby."""
        versions = [f.version for f in self.state.rounds.fragments]
        return self._is_blocked or self._is_restoring or versions != [len(values) - 1 for values in self.disk.anchors]

    # ---------------------------------------------------------------------------------------------------------- events

    def _handle_own(self, event: on.SyncerEvent, boot: int) -> None:
        """Handle an event of a thread of this process, unless the process was killed meanwhile."""
        if boot == self.boot:
            self.handle(event)

    def _take_events(self) -> None:
        while self._inbox and not self._is_blocked:
            self.event_came_s, event = self._inbox.popleft()
            self._world.saw("syncer", event)
            try:
                self._todo.extend(self.state.handle(event, self.event_came_s))
                self._carry_out()
            except Killed:
                self._start_again()

    def _carry_out(self) -> None:
        """Carry out actions in order; after some records, the next one waits until the standby has them."""
        while self._todo:
            action = self._todo.popleft()
            if self._may_die:
                self.crashes.before(action)
            self._do(action)
            if isinstance(action, do.Record) and action.values["kind"] not in IN_FLIGHT and self._is_standby_behind:
                self._is_blocked = True
                self._when_copied(partial(self._go_on, self.boot))
                return
        self._world.audit()

    def _go_on(self, boot: int) -> None:
        if boot == self.boot:
            self._is_blocked = False
            try:
                self._carry_out()
            except Killed:
                self._start_again()
            self._take_events()

    def _start_again(self) -> None:
        """Restart the process, which was killed at one of its actions."""
        self.restart(use_snapshot=True)

    # --------------------------------------------------------------------------------------------------------- actions

    def _do(self, action: do.SyncerAction) -> None:
        now_s, boot = self._timeline.now_s, self.boot
        match action:
            case do.Send() if self.standby is None:
                self._world.deliver(action.session, action.message, boot)
            case do.Send():
                self._when_copied(partial(self._send, action, boot), self._num_decided)
            case do.Record():
                self._append(action.values)
                self._num_decided = len(self.disk.log)
            case do.Merge():
                self._begin_merge(action)
                self._reach_shard(action)
            case do.Apply():
                self._timeline.after(self._merge_s, partial(self._commit, action, boot))
                self._reach_shard(action)
            case do.DropPayload():
                self.payloads.pop((action.session, action.fragment, action.seq), None)
            case do.StoreSeed():
                digests = ("start",) * self._config.fragments_wanted
                self._timeline.after(0.0, partial(self._handle_own, on.SeedStored(action.lease, digests), boot))
            case do.Note():
                self.notes.append((now_s, action))
                if action.event == "commit":
                    self.on_commit(action.fields["learners"])

    def _send(self, action: do.Send, boot: int) -> None:
        if boot == self.boot:
            self._world.deliver(action.session, action.message, boot)

    def _begin_merge(self, action: do.Merge) -> None:
        """Merge a round. There is no result if the shard has lost a payload and the state machine will hear of it."""
        p, num_lost = action.fragment, self._num_lost[action.fragment]
        keys = [(c.session, p, c.ready.seq) for c in action.contributions]
        if num_lost and not all(key in self.payloads for key in keys):
            return
        merged = self._merge(action)
        self._gradients[p, action.round] = sum(int(self.payloads[key] * merged.kept.get(key[0], 1.0)) for key in keys)
        self._timeline.after(self._merge_s, partial(self._merged, merged, self.boot, num_lost))

    def _merge(self, action: do.Merge) -> on.Merged:
        """Return the result of merging a round."""
        return on.Merged(
            action.fragment, action.round, {c.session: self._kept_by_guard() for c in action.contributions}
        )

    def _reach_shard(self, action: do.Merge | do.Apply) -> None:
        """Kill the shard during this action, if it is to die there."""
        if type(action) is self.shard_dies_at and action.fragment % 2:
            self._timeline.after(0.0, self.restart_shard)

    def _merged(self, event: on.Merged, boot: int, num_lost: int) -> None:
        if num_lost == self._num_lost[event.fragment]:
            self._handle_own(event, boot)

    def _kept_by_guard(self) -> float:
        return self._chance.random() if self.guard and self._chance.random() < self.guard else 1.0

    def _commit(self, action: do.Apply, boot: int) -> None:
        if boot != self.boot:
            return
        if self._is_suspended:
            self._waiting.append(partial(self._commit, action, boot))
            return
        p = action.fragment
        if self.disk_is_full:
            self.handle(on.CommitFailed(p, action.round, "no space left on device"))
            return
        if (p, action.round) not in self._gradients:
            self.handle(on.CommitFailed(p, action.round, "the shard was restarted"))
            return
        try:
            self.crashes.reach("append")
            self._append(action.record, self._gradients[p, action.round], is_commit=True)
            self.crashes.reach("tell")
            committed = on.Committed(p, action.round, self.disk.digests[p][-1])
            self._when_copied(partial(self._handle_own, committed, boot))
        except Killed:
            self._start_again()

    # --------------------------------------------------------------------------------------------------------- standby

    @property
    def _is_standby_behind(self) -> bool:
        return self.standby is not None and self.standby.is_awaited(len(self.disk.log))

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
