"""The syncer's process in a simulation: its state machine, its disk, merges that take time, kills and restarts.

Payloads are numbers of tokens, and a merge is their sum. What belongs to an earlier process (`boot`) has no effect.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.simulate.crashes import CrashPoints, Killed
from lightning_diloco.simulate.disk import Disk
from lightning_diloco.simulate.timeline import Timeline

NUM_NOTES_KEPT = 1000

Send = Callable[[str, messages.FromSyncer, int], None]


class SimulatedSyncer:
    """A syncer over all of its processes.

    Args:
        time: the simulated time.
        chance: randomness of the norm guard.
        num_fragments: P.
        merge_s: duration of one merge, and of one commit.
        expect: number of learners for which the start waits.
        crashes: points where the process is killed.
        guard: probability that the norm guard scales a contribution down.
        is_audited: whether everything is kept; False for long forecasts.
        send: called with session, message and the number of this process.
        handled: called after every event.
        killed: called when the process is killed at a crash point.

    Attributes:
        state: the state machine.
        boot: number of the process.
        disk_is_full: whether commits fail.
        notes: what the machine has noted, with its time.
    """

    def __init__(
        self,
        time: Timeline,
        chance: random.Random,
        *,
        num_fragments: int,
        merge_s: float,
        expect: int | None,
        crashes: CrashPoints,
        guard: float,
        is_audited: bool,
        send: Send,
        handled: Callable[[], None],
        killed: Callable[[], None],
    ) -> None:
        self.state = SyncerState(run="simulated", expect=expect, secret="simulated")
        self.disk = Disk(keeps_log=is_audited)
        self.disk_is_full = False
        self.boot = 0
        self.notes: deque[tuple[float, do.Note]] = deque(maxlen=None if is_audited else NUM_NOTES_KEPT)
        self._time, self._chance = time, chance
        self._num_fragments, self._merge_s, self._expect, self._guard = num_fragments, merge_s, expect, guard
        self._crashes = crashes
        self._send, self._handled, self._killed = send, handled, killed
        self._suspended_until_s = 0.0
        self._payloads: dict[tuple[str, int, int], int] = {}
        self._gradients: dict[tuple[int, int], int] = {}

    # ---------------------------------------------------------------------------------------------------- from outside

    def restart(self, *, use_snapshot: bool, lose: int) -> None:
        """Kill the process and start another one from the disk, which may have lost the newest records."""
        self.boot += 1
        self._suspended_until_s = 0.0
        self._payloads.clear()
        if lose:
            self.disk.lose(lose)
        self.state = self.disk.recovered(expect=self._expect, now_s=self._time.now_s, use_snapshot=use_snapshot)

    def suspend(self, for_s: float) -> None:
        """Let the process stand still: what reaches it waits, and it notices the gap."""
        self._suspended_until_s = self._time.now_s + for_s
        self._time.after(for_s, partial(self._from_own_thread, on.StoodStill(for_s), self.boot))

    def receive(self, session: str, ready: messages.Ready, tokens: int, error: str | None) -> None:
        """Take a contribution's payload, unless it is broken."""
        if error is None:
            self._payloads[session, ready.fragment, ready.seq] = tokens
        self.handle(on.PayloadReceived(session, ready, error))

    def handle(self, event: on.SyncerEvent) -> None:
        """Handle an event now, or when the process is no longer suspended."""
        if self._time.now_s < self._suspended_until_s:
            wait_s = self._suspended_until_s - self._time.now_s
            self._time.after(wait_s, partial(self._from_own_thread, event, self.boot))
            return
        self._time.note("syncer", event)
        with self._mortal():
            for action in self.state.handle(event, self._time.now_s):
                self._crashes.before(action)
                self._do(action)
        self._handled()

    # ------------------------------------------------------------------------------------------------------ machinery

    def _from_own_thread(self, event: on.SyncerEvent, boot: int) -> None:
        if boot == self.boot:
            self.handle(event)

    def _later(self, delay_s: float, event: on.SyncerEvent) -> None:
        self._time.after(delay_s, partial(self._from_own_thread, event, self.boot))

    def _do(self, action: do.SyncerAction) -> None:
        match action:
            case do.Send():
                self._send(action.session, action.message, self.boot)
            case do.Record():
                self.disk.append(action.values)
            case do.Merge():
                merged = self._merge(action)
                self._gradients[action.fragment, action.round] = sum(
                    int(self._payloads[c.session, c.ready.fragment, c.ready.seq] * merged.kept.get(c.session, 1.0))
                    for c in action.contributions
                )
                self._later(self._merge_s, merged)
            case do.Apply():
                self._time.after(self._merge_s, partial(self._commit, action, self.boot))
            case do.DropPayload():
                self._payloads.pop((action.session, action.fragment, action.seq), None)
            case do.StoreSeed():
                self._later(0.0, on.SeedStored(action.lease, ("start",) * self._num_fragments))
            case do.Note():
                self.notes.append((self._time.now_s, action))

    def _merge(self, action: do.Merge) -> on.Merged:
        """What the arithmetic says of a round."""
        kept = {c.session: self._kept_by_guard() for c in action.contributions}
        return on.Merged(action.fragment, action.round, kept)

    def _kept_by_guard(self) -> float:
        return self._chance.random() if self._guard and self._chance.random() < self._guard else 1.0

    def _commit(self, action: do.Apply, boot: int) -> None:
        if boot != self.boot:
            return
        if self._time.now_s < self._suspended_until_s:
            self._time.after(self._suspended_until_s - self._time.now_s, partial(self._commit, action, boot))
            return
        p = action.fragment
        if self.disk_is_full:
            self.handle(on.CommitFailed(p, action.round, "no space left on device"))
            return
        with self._mortal():
            self._crashes.reach("append")
            self.disk.append(action.record, self._gradients[p, action.round])
            self._crashes.reach("tell")
            self.handle(on.Committed(p, action.round, self.disk.digests[p][-1]))

    @contextmanager
    def _mortal(self) -> Iterator[None]:
        """Context for actions at which the process may be killed."""
        try:
            yield
        except Killed:
            self._killed()
