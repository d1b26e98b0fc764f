"""Runs random histories of a fleet, to find one that breaks an invariant.

1. A history follows from its seed: a config, a network, and a list of steps. Learners join, finish, hang, and are cut
   off, in both directions or only from what the syncer sends. Learners and syncer are killed between any two of their
   actions. The places of learners are taken by new processes, also while the old ones train on. The syncer restarts
   from a snapshot, is suspended, or loses the newest records of its disk. The disk fills up. A standby follows the
   syncer, is cut off or given up, or takes over. Messages are lost, repeated, and overtake each other. Before the disk
   loses records, all learners are reconnected, because the syncer recognizes only recent versions as lost.
2. The invariants are checked after every event, and the whole log after every step. At the end, all learners reconnect,
   the network becomes that of real runs, in which polls are answered in order, and the norm guard scales nothing down.
   Then each learner must get its work merged, at least one of MERGED_OF successive contributions, drain completely and
   leave, and the ledger must be exact.
3. Not played: a torn record, because opening the log cuts it off, so it is a lost record here
   (`tests/storage/test_redo_log.py` tears one at every byte); a clock that jumps back, because the machines get a
   monotonic one (a jump forward is a suspension); a learner that resumes from its checkpoint, because it joins like a
   new one.
4. A step names learners by position, so a history is still valid if steps are left out. A failing history is shrunk:
   steps are left out as long as it still fails.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_diloco.config import Align, RunConfig
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol.syncer.records import CommitRecord
from lightning_diloco.simulate.disk import Entry
from lightning_diloco.simulate.fleet import Fleet
from lightning_diloco.simulate.learner import SimulatedLearner
from lightning_diloco.simulate.reading import Data
from lightning_diloco.simulate.settings import Network, Pace

DATA = (Data(sizes=(90,), range_size=8), Data(sizes=(33, 0, 50), range_size=8, is_stream=True))
MAX_STEPS = 40
MAX_LEARNERS = 6
MERGED_OF = 3
RECONNECT_S, MERGED_S, DRAIN_S, LEAVE_S = 8.0, 60.0, 100.0, 120.0
FASTEST_S, SLOWEST_S = 0.2, 2.0  # steps
MERGED_PERIODS = 5  # periods of H steps of the slowest learner and the uploads of all fragments
_WEIGHTS = {
    "join": 2, "replace": 2, "kill": 1, "cut": 2, "deafen": 1, "heal": 3, "finish": 1, "spoil a payload": 1,
    "restart the syncer": 1, "kill the syncer": 3, "suspend the syncer": 1, "evaluate": 1, "hang": 1,
    "fill the disk": 1, "snapshot": 1, "roll back": 1, "wait": 6, "restart a shard": 2, "add a standby": 2,
    "cut off the standby": 1, "heal the standby": 1, "take over": 2, "continue alone": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a history: its kind, the position of the learner it affects, and its duration or amount, 0..1."""

    kind: str
    who: int
    amount: float


@dataclass(frozen=True, slots=True)
class Violation:
    """A history that breaks an invariant.

    Args:
        seed: seed of the history.
        kept: numbers of the steps that are needed, after shrinking.
        text: the invariant, and the last events.
    """

    seed: int
    kept: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Args:
        seeds: number of histories that were played.
        events: number of events that were checked.
        violation: the first violation; None if there is none.
    """

    seeds: int
    events: int
    violation: Violation | None


def explore(first_seed: int, *, num_seeds: int | None = None, for_s: float | None = None) -> Found:
    """Play histories until one breaks an invariant.

    Args:
        first_seed: seed of the first history; the next ones follow.
        num_seeds: number of histories to play; None: no limit.
        for_s: how long to search, in seconds of real time; None: no limit.
    """
    began_s, num_events, seed = time.monotonic(), 0, first_seed
    while num_seeds is None or seed < first_seed + num_seeds:
        if for_s is not None and time.monotonic() - began_s > for_s:
            break
        history = History(seed)
        text = history.play()
        num_events += history.num_events
        seed += 1
        if text is not None:
            return Found(seed - first_seed, num_events, shrunk(history.seed, text))
    return Found(seed - first_seed, num_events, None)


def shrunk(seed: int, text: str) -> Violation:
    """Leave out steps, first many at once, as long as the history still fails."""
    kept = tuple(range(len(History(seed).steps)))
    size = max(1, len(kept) // 2)
    while True:
        for begin in range(0, len(kept), size):
            fewer = kept[:begin] + kept[begin + size :]
            if (found := History(seed, kept=fewer).play()) is not None:
                kept, text = fewer, found
                break
        else:
            if size == 1:
                return Violation(seed, kept, text)
            size = max(1, size // 2)


class History:
    """One history, which is played once.

    Args:
        seed: seed of all randomness in it.
        kept: numbers of the steps to play; None: all.
    """

    def __init__(self, seed: int, *, kept: Sequence[int] | None = None) -> None:
        self.seed = seed
        chance = random.Random(seed)
        num_fragments = chance.randint(1, 4)
        config = RunConfig(
            sync_every=chance.choice((1, 2, 2, 5)) * num_fragments,
            num_fragments=num_fragments,
            overlap=chance.randint(1, min(2, num_fragments)),
            quorum=chance.randint(1, 3),
            grace=chance.choice(("adaptive", "adaptive", 0.0, 3.0)),
            lease_s=5.0,
            max_staleness_versions=chance.choice((1, 4)),
        )
        loss = chance.choice((0.0, 0.2))
        upload_s, jitter = chance.choice((0.1, 3.0)), chance.choice((0.0, 3.0))
        self._merged_s = max(MERGED_S, MERGED_PERIODS * (SLOWEST_S * config.sync_every + upload_s * num_fragments))
        network = Network(latency_s=0.05, upload_s=upload_s, download_s=0.3, loss=loss, repeats=loss, jitter=jitter)
        self._fleet = Fleet(config, network=network, seed=seed, guard=chance.choice((0.0, 0.3)))
        self._data = chance.choice(DATA)
        self._align: Align = chance.choice(("carry", "carry", "carry", "overwrite"))
        kinds, weights = list(_WEIGHTS), list(_WEIGHTS.values())
        num_steps = chance.randint(5, MAX_STEPS)
        self.steps = [
            Step(chance.choices(kinds, weights)[0], chance.randrange(MAX_LEARNERS), chance.random())
            for _ in range(num_steps)
        ]
        self._kept = [number for number in (range(num_steps) if kept is None else kept) if number < num_steps]
        self._num_names = 0

    @property
    def num_events(self) -> int:
        """Return the number of events that were checked so far."""
        return self._fleet.num_events

    def play(self) -> str | None:
        """Play the history; returns the violation, if there is one."""
        try:
            for _ in range(2):
                self._join(0.4)
            self._fleet.run_for(4.0)
            for number in self._kept:
                self._do(self.steps[number])
                if not self._fleet.syncer.is_in_between:
                    self._fleet.invariants.audit()
            self._end()
        except (AssertionError, ValueError, KeyError, TimeoutError) as violation:
            return f"{type(violation).__name__}: {violation}"
        return None

    def _do(self, step: Step) -> None:
        does: dict[str, Callable[[float], object]] = {
            "join": self._join,
            "restart the syncer": lambda amount: self._fleet.syncer.restart(use_snapshot=amount < 0.5),
            "kill the syncer": lambda amount: self._fleet.syncer.crashes.arm("", 1 + int(12 * amount)),
            "restart a shard": self._restart_shard,
            "suspend the syncer": lambda amount: self._fleet.syncer.suspend(10.0 * amount),
            "fill the disk": self._fill_the_disk,
            "snapshot": lambda _: self._take_snapshot(),
            "roll back": self._roll_back,
            "wait": lambda amount: self._fleet.run_for(8.0 * amount),
            "add a standby": self._add_standby,
            "cut off the standby": self._cut_off_standby,
            "heal the standby": lambda _: self._heal_standby(),
            "take over": self._take_over,
            "continue alone": lambda _: self._fleet.syncer.continue_alone(),
        }
        if step.kind in does:
            does[step.kind](step.amount)
        elif there := [learner for learner in self._fleet.learners.values() if not learner.is_gone]:
            self._do_to(there[step.who % len(there)], step)
        self._fleet.run_for(0.7)

    def _do_to(self, learner: SimulatedLearner, step: Step) -> None:
        is_training = learner.is_stepping and learner.state is not None and learner.state.phase == "stepping"
        match step.kind:
            case "replace":
                if not learner.is_cut:  # otherwise the new process takes over from one that trains on, and returns
                    self._fleet.kill(learner)
                self._fleet.start(learner.name, self._pace(step.amount, starts_s=1.5))
            case "cut":
                self._fleet.cut(learner)
            case "kill":
                learner.dies_in = 1 + int(12 * step.amount)
            case "deafen":
                learner.is_deaf = True
            case "heal" if learner.is_cut or learner.is_deaf:
                self._fleet.heal(learner)
            case "finish" if is_training:
                self._fleet.finish(learner)
            case "spoil a payload":
                learner.bad_payload = True
            case "evaluate" if is_training:
                self._fleet.evaluate(learner, 1.0 + 6.0 * step.amount)
            case "hang" if is_training:
                self._fleet.stall(learner, 20.0 * step.amount)

    def _join(self, amount: float) -> None:
        if sum(not learner.is_gone for learner in self._fleet.learners.values()) < MAX_LEARNERS:
            self._num_names += 1
            self._fleet.start(f"l{self._num_names}", self._pace(amount))

    def _pace(self, amount: float, *, starts_s: float = 0.0) -> Pace:
        tokens = 1 + int(9 * amount)
        return Pace(
            step_s=FASTEST_S + (SLOWEST_S - FASTEST_S) * amount**2,
            tokens=tokens,
            align=self._align,
            jitter=0.1,
            drain_s=20.0,
            starts_s=starts_s,
            has_ranks=tokens % 3 == 0,
            data=self._data,
        )

    def _fill_the_disk(self, amount: float) -> None:
        self._fleet.syncer.disk_is_full = True
        self._fleet.run_for(4.0 * amount)
        self._fleet.syncer.disk_is_full = False

    def _restart_shard(self, amount: float) -> None:
        if amount < 0.4:
            self._fleet.syncer.restart_shard(away_s=max(0.0, 60.0 * amount - 12.0))
        else:
            self._fleet.syncer.shard_dies_at = do.Merge if amount < 0.7 else do.Apply

    def _roll_back(self, amount: float) -> None:
        self._heal_all()
        self._fleet.syncer.restart(lose=1 + int(8 * amount))

    def _take_snapshot(self) -> None:
        if not self._fleet.syncer.is_in_between:  # like a real syncer, which takes none then
            self._fleet.syncer.disk.take_snapshot(self._fleet.syncer.state)

    def _add_standby(self, amount: float) -> None:
        if self._fleet.syncer.standby is None and self._fleet.syncer.state.manifest is not None:
            self._fleet.syncer.add_standby(0.01 + amount**2, commit_s=amount**2)

    def _cut_off_standby(self, _: float) -> None:
        if (standby := self._fleet.syncer.standby) is not None:
            standby.is_cut = True

    def _heal_standby(self) -> None:
        if (standby := self._fleet.syncer.standby) is not None and standby.is_cut:
            standby.heal()

    def _take_over(self, amount: float) -> None:
        if self._fleet.syncer.standby is not None:
            self._cut_off_standby(amount)
            self._fleet.run_for(2.0 * amount)  # the syncer writes records that the standby does not get
            self._fleet.syncer.take_over()

    def _heal_all(self) -> None:
        self._heal_standby()
        for learner in self._fleet.learners.values():
            if learner.is_cut or learner.is_deaf:
                self._fleet.heal(learner)

    def _end(self) -> None:
        fleet = self._fleet
        fleet.network = replace(fleet.network, loss=0.0, repeats=0.0, jitter=0.0)
        for learner in fleet.learners.values():
            learner.connected_s, learner.dies_in = fleet.now_s, None  # its last messages may have been lost
        fleet.syncer.guard = 0.0  # work that the norm guard cut off waits for further rounds without a time limit
        self._heal_all()
        fleet.run_for(RECONNECT_S)
        for learner in fleet.learners.values():
            assert "no proof" not in (learner.error or ""), f"{learner.session} was rejected: {learner.error}"
        training = list(self._training())
        before = {learner.session: learner.state.tokens for learner in training if learner.state is not None}
        num_records = len(fleet.syncer.disk.log)
        fleet.run_for(self._merged_s)
        for learner in training:
            self._check_merged(learner, before[learner.session])
            self._check_regular(learner, fleet.syncer.disk.log[num_records:])
        undrained_before = self._num_undrained()
        for learner in self._training():
            fleet.finish(learner, within_s=DRAIN_S)
        fleet.run_to_the_end(limit_s=fleet.now_s + LEAVE_S)
        fleet.run_for(RECONNECT_S)
        fleet.invariants.audit()
        there = [member.session for member in fleet.syncer.state.roster.live()]
        assert not there, f"all processes are gone, and {there} still take part\n{fleet.story()}"
        fleet.syncer.state.finish()
        left_over = self._num_undrained() - undrained_before
        assert left_over == 0, f"learners left with {left_over} tokens unmerged after a quiet drain\n{fleet.story()}"
        totals = fleet.syncer.state.ledger.totals()
        assert totals.pending == 0, f"the run is over, and tokens are pending: {totals}"
        assert totals.is_exact, f"the ledger is not exact: {totals}"

    def _num_undrained(self) -> int:
        return self._fleet.syncer.state.ledger.totals().discarded["undrained"]

    def _training(self) -> Iterator[SimulatedLearner]:
        for learner in self._fleet.learners.values():
            if learner.is_stepping and not learner.is_gone:
                yield learner

    def _check_merged(self, learner: SimulatedLearner, tokens: int) -> None:
        """Check that no token is pending that a learner had trained before the time without faults."""
        if learner.is_gone or learner.state is None:
            return
        for p, f in enumerate(learner.state.fragments):
            pending = f.pending(learner.state.tokens)
            assert all(start >= tokens for start, _ in pending), (
                f"{learner.session} waits for a merge of fragment {p} since {self._merged_s:.0f} quiet seconds: "
                f"{pending}, it had trained {tokens} tokens then\n{self._fleet.story()}"
            )

    def _check_regular(self, learner: SimulatedLearner, log: Sequence[Entry]) -> None:
        """Check that slow learners are waited for: of several successive contributions, at least one is merged."""
        merged: dict[int, int] = {}  # by fragment: the newest seq
        for record in (entry.record for entry in log):
            merges = record.merges if isinstance(record, CommitRecord) else ()
            for fragment, seq in ((record.fragment, m.ready.seq) for m in merges if m.session == learner.session):
                skipped = seq - merged.get(fragment, seq) - 1
                assert skipped < MERGED_OF, (
                    f"{skipped} contributions of {learner.session} to fragment {fragment} in a row were not merged, up "
                    f"to seq {seq}\n{self._fleet.story()}"
                )
                merged[fragment] = seq
