"""The rules of primary and standby, and a search for schedules in which both serve, or neither does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer import succession as rules
from lightning_diloco.protocol.syncer.succession import Fleets, Primary, Standby

HEARTBEAT_S, TICK_S, AGAIN_S = 1.0, 0.25, 0.5
HEALED_S = 60.0


# ----------------------------------------------------------------------------------------------------------- the rules


def heard_every(primary: Primary, session: str, period_s: float, until_s: float) -> None:
    now_s = 0.0
    while now_s <= until_s:
        primary.heard(session, now_s)
        now_s += period_s


STANDBY_S = rules.BEFORE_S + 1.0  # time of the standby's last call
ALONE_S = STANDBY_S + rules.ALONE_S


def with_learners(learners: str, period_s: float = 1.0) -> Primary:
    """Return a primary with learners that call it all the time; each letter is a learner."""
    primary = Primary(0.0)
    for learner in learners:
        heard_every(primary, learner, period_s, ALONE_S)
    primary.heard_standby(STANDBY_S)
    return primary


def alone(primary: Primary, *fleets: str, at_s: float = ALONE_S) -> bool:
    """Return whether the primary may continue alone; each letter is a learner."""
    found = Fleets.only(fleets[0])
    for fleet in fleets[1:]:
        found = found.or_(fleet)
    return primary.may_continue_alone(found, at_s)


def test_a_primary_continues_alone_with_half_of_its_learners() -> None:
    primary = with_learners("a")
    assert alone(primary, "ab")
    assert not alone(primary, "abc")


def test_a_primary_continues_alone_only_with_half_of_every_fleet_that_the_standby_may_count() -> None:
    primary = with_learners("ab")
    assert alone(primary, "ab", "abcd")
    assert alone(primary, "abcd", "ab")
    assert not alone(primary, "abcde", "ab"), "three lapse, and the standby has no record of it"
    assert not alone(primary, "ac", "bc"), "one leaves and one comes: without both, c is half of no fleet"
    assert alone(primary, "abcd")
    assert not alone(primary, "abcd", "acd", "abcd"), "one lapses and returns"
    named = Fleets.only("abc").or_("abc", changed="ad")
    assert named == Fleets(frozenset("bc"), frozenset("abcd")), "the same within one event"


def test_records_name_the_sessions_that_join_and_leave() -> None:
    assert rules.changed_by(records.encode(records.Returned("s"))) == {"s"}
    assert rules.changed_by(records.encode(records.Released("l"))) == set()
    assert not rules.IN_FLIGHT & rules._CHANGES


def test_a_primary_waits_for_a_standby_that_has_just_called() -> None:
    primary = with_learners("a")
    assert not alone(primary, "a", at_s=ALONE_S - 0.1)
    assert alone(primary, "a", at_s=ALONE_S)


def test_a_learner_that_paused_does_not_count_for_the_primary() -> None:
    assert not alone(with_learners("a", rules.PAUSE_S + 0.1), "a")


def test_a_learner_that_came_back_later_does_not_count_for_the_primary() -> None:
    """It may have asked the standby, which may serve the run now."""
    primary = Primary(0.0)
    primary.heard_standby(STANDBY_S)
    now_s = STANDBY_S - rules.BEFORE_S + 0.1
    while now_s <= 10 * ALONE_S:
        primary.heard("a", now_s)
        now_s += 1.0
    assert not alone(primary, "a", at_s=now_s)
    assert alone(primary, "", at_s=now_s), "without learners, nobody can ask the standby"


def test_a_standby_takes_over_with_more_than_half_of_the_learners_that_ask() -> None:
    standby = Standby()
    standby.answered(0.0, 0.0)
    standby.asked("l0", rules.QUIET_S)
    assert standby.may_take_over(["l0"], rules.QUIET_S)
    assert not standby.may_take_over(["l0", "l1"], rules.QUIET_S), "a tie is the primary's"
    assert not standby.may_take_over(["l0"], rules.QUIET_S - 0.1), "the primary may still answer"
    assert not standby.may_take_over(["l0"], rules.QUIET_S + rules.ASKED_S + 0.1), "the learner no longer asks"
    standby.asked("l0", rules.FRESH_S)
    assert not standby.may_take_over(["l0"], rules.FRESH_S), "the primary may continue alone soon"


def test_a_standby_that_never_had_all_records_does_not_take_over() -> None:
    standby = Standby()
    standby.asked("l0", 0.0)
    assert not standby.may_take_over(["l0"], 1.0)


# ---------------------------------------------------------------------------------------------------------- the search


Fleet = frozenset[str]


@dataclass
class PrimaryMachine:
    """The process of the primary between two restarts.

    Args:
        log: the fleet after each record on its disk.
        now_s: current time.
    """

    log: list[Fleet]
    now_s: float

    def __post_init__(self) -> None:
        self.rule = Primary(self.now_s)
        self.fleets = Fleets.only(self.log[max(0, len(self.log) - 2)]).or_(self.log[-1])
        self.acked, self.counts_from = 0, len(self.log)
        self.unwritten: list[Fleet] = []

    @property
    def is_waiting(self) -> bool:
        return self.acked < len(self.log)

    def decide(self, *fleets: Fleet) -> None:
        """Handle an event, given as the fleet after each of its records."""
        changed = {name for one, other in pairwise([self.log[-1], *fleets]) for name in one ^ other}
        self.fleets = self.fleets.or_(fleets[-1], changed)
        self.unwritten = list(fleets)
        self.go_on()

    def go_on(self) -> None:
        """Write the next record, if the standby has all before it."""
        if not self.is_waiting and self.unwritten:
            self.log.append(self.unwritten.pop(0))
        elif not self.is_waiting:
            self.fleets = Fleets.only(self.log[-1])

    def reported(self, num_records: int, now_s: float) -> bool:
        """Take the standby's report; return whether it counts (`syncer/standby/replica.py`)."""
        if is_in_step := num_records == len(self.log) or num_records > self.acked:
            self.rule.heard_standby(now_s)
        self.acked = num_records
        counts = is_in_step and num_records >= self.counts_from
        self.go_on()
        return counts


@dataclass
class World:
    """Two syncers and learners in virtual time; syncers are killed and started, and the network is cut, at random.

    A call takes up to CALL_S, or fails after it. Learners dial as `learner/rotation.py` does. Some worlds have slow
    calls, some are calmer than others, and in some the fleet changes.
    """

    num_learners: int
    seed: int
    now_s: float = 0.0
    cut: set[frozenset[str]] = field(default_factory=set)
    down: set[str] = field(default_factory=set)
    is_alone: bool = False
    has_taken_over: bool = False
    was_told: bool = False
    is_healed: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.slow, self.calm_s = self._random.choice((0.0, 0.02, 0.5)), self._random.choice((3.0, 10.0, 30.0))
        self.steady_s = self._random.choice((2.0, 10.0, 1e9))
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.names = [f"l{k}" for k in range(self.num_learners)]
        self.log = [frozenset(self.names)]
        self.num_copied = 1
        self.primary, self.standby = PrimaryMachine(self.log, 0.0), Standby()
        self.answered_s = dict.fromkeys(self.names, 0.0)
        self.dialled_s = dict.fromkeys(self.names, -rules.CALL_S)
        self.dials = dict.fromkeys(self.names, "P")
        self._follow()
        for name in self.names:
            self._beat(name)
        self._disturb()
        self._decide()
        self.after(self.steady_s, self._change_fleet)

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        self._count += 1
        self._queue.append((self.now_s + delay_s, self._count, do))

    def run(self, until_s: float) -> None:
        while self._queue and not (self.is_alone and self.has_taken_over):
            self._queue.sort()
            if self._queue[0][0] > until_s:
                return
            self.now_s, _, do = self._queue.pop(0)
            do()

    def heal(self) -> None:
        """Start both syncers, mend all connections, and let neither them nor the fleet change any more."""
        self.is_healed = True
        self._mend()

    def _mend(self) -> None:
        self.cut = set()
        for syncer in sorted(self.down):
            self._start(syncer)

    def _start(self, syncer: str) -> None:
        """Start a syncer again, with what it has on disk."""
        self.down.remove(syncer)
        if syncer == "P":
            self.primary = PrimaryMachine(self.log, self.now_s)
        else:
            self.standby = Standby()

    @property
    def serving(self) -> set[str]:
        """The syncers that announce decisions."""
        primary = not self.was_told and (self.is_alone or not self.primary.is_waiting)
        found = {"P": primary, "S": self.has_taken_over}
        return {syncer for syncer, serves in found.items() if serves and syncer not in self.down}

    def _reaches(self, a: str, b: str) -> bool:
        return not {a, b} & self.down and frozenset((a, b)) not in self.cut

    def _disturb(self) -> None:
        """Cut or mend a connection, or stop or start a syncer."""
        if self.is_healed:
            return
        nodes = ["P", "S", *self.names]
        if self._random.random() < 0.4:
            syncer = self._random.choice("PPS")
            if syncer in self.down:
                self._start(syncer)
            else:
                self.down.add(syncer)
        else:
            self.cut ^= {frozenset(self._random.sample(nodes, 2))}
        if self._random.random() < 0.1:
            self._mend()
        self.after(self._random.expovariate(1 / self.calm_s), self._disturb)

    def _call(self, a: str, b: str, arrives: Callable[[], bool], ends: Callable[[bool], None]) -> None:
        """Send a call; `arrives` returns whether it is answered, `ends` is called with whether an answer came."""
        slow = self._random.random() < self.slow
        there_s, back_s = (self._random.choice((0.01, 0.1, rules.CALL_S / 2) if slow else (0.01, 0.1)) for _ in "ab")
        if not self._reaches(a, b):
            self.after(self._random.choice((0.05, rules.CALL_S)), lambda: ends(False))
            return

        def arrive() -> None:
            is_answered = self._reaches(a, b) and arrives()
            self.after(back_s, lambda: ends(is_answered and self._reaches(a, b)))

        self.after(there_s, arrive)

    def _change_fleet(self) -> None:
        """Let the primary handle an event with one to three records."""
        if self.is_healed:
            return
        if "P" not in self.down and not (self.primary.is_waiting or self.is_alone or self.was_told):
            fleets, fleet = [], set(self.log[-1])
            for name in self._random.choices(self.names, k=self._random.randint(1, 3)):
                fleet ^= {name}
                fleets.append(frozenset(fleet))
            self.primary.decide(*fleets)
        self.after(self._random.expovariate(1 / self.steady_s), self._change_fleet)

    def _follow(self) -> None:
        """Let the standby report its records and copy new ones."""
        sent_s, num_copied, process = self.now_s, self.num_copied, self.standby
        counts, newest = False, num_copied

        def arrives() -> bool:
            nonlocal counts, newest
            if self.is_alone or self.has_taken_over:
                return False
            counts = self.primary.reported(num_copied, self.now_s)
            newest = len(self.log)
            return True

        def ends(is_answered: bool) -> None:
            if is_answered and not self.has_taken_over and self.standby is process:
                self.num_copied = newest
                if counts:
                    self.standby.answered(sent_s, self.now_s)
            self.after(0.2, self._follow)

        self._call("S", "P", arrives, ends)

    def _beat(self, name: str) -> None:
        """Let a learner call the syncer that it dials."""
        where = self.dials[name]

        def arrives() -> bool:
            if where == "P":
                if self.was_told:
                    return False
                self.primary.rule.heard(name, self.now_s)
                return True
            self.standby.asked(name, self.now_s)
            return self.has_taken_over

        def ends(is_answered: bool) -> None:
            if is_answered:
                self.answered_s[name] = self.now_s
            elif (
                self.now_s - self.answered_s[name] >= rules.ASK_AFTER_S
                and self.now_s - self.dialled_s[name] >= rules.CALL_S
            ):
                self.dials[name], self.dialled_s[name] = ("S" if where == "P" else "P"), self.now_s
            self.after(HEARTBEAT_S if is_answered else AGAIN_S, lambda: self._beat(name))

        self._call(name, where, arrives, ends)

    def _decide(self) -> None:
        primary = self.primary
        if "P" not in self.down and not self.was_told and primary.rule.may_continue_alone(primary.fleets, self.now_s):
            self.is_alone = True
        if "S" not in self.down and self.standby.may_take_over(self.log[self.num_copied - 1], self.now_s):
            if not self.has_taken_over:
                self._tell()
            self.has_taken_over = True
        self.after(TICK_S, self._decide)

    def _tell(self) -> None:
        """Let the standby tell the primary that it has taken over. Until then, the primary answers learners."""

        def arrives() -> bool:
            self.was_told = True
            return True

        self._call("S", "P", arrives, lambda is_answered: self._told(is_answered=is_answered))

    def _told(self, *, is_answered: bool) -> None:
        if not is_answered:
            self.after(2.0, self._tell)


def outcome(seed: int) -> str:
    world = World(num_learners=1 + seed % 5, seed=seed)
    world.run(200.0)
    kind = {(0, 0): "neither", (1, 0): "alone", (0, 1): "taken over", (1, 1): "both"}
    return kind[int(world.is_alone), int(world.has_taken_over)]


@pytest.mark.seconds
def test_no_schedule_makes_both_syncers_serve() -> None:
    found = Counter(map(outcome, range(500)))
    assert found["both"] == 0, found
    assert min(found["alone"], found["taken over"], found["neither"]) >= 10, f"the search must reach all cases: {found}"


@pytest.mark.seconds
@pytest.mark.parametrize(
    "weaker",
    [{"BEFORE_S": -1000.0, "ALONE_S": 3.0}, {"BEFORE_S": -1000.0}, {"FRESH_S": 1000.0}, {"PAUSE_S": 100.0}],
    ids=" ".join,
)
def test_the_search_detects_weaker_rules(monkeypatch: pytest.MonkeyPatch, weaker: dict[str, float]) -> None:
    for name, value in weaker.items():
        monkeypatch.setattr(rules, name, value)
    assert any(outcome(seed) == "both" for seed in range(1000))


def serves_in_the_end(seed: int, kind: type[World] = World) -> bool:
    """Return whether exactly one syncer serves, and answers all learners, some time after all faults have ended."""
    world = kind(num_learners=1 + seed % 5, seed=seed)
    world.run(100.0)
    world.heal()
    world.run(100.0 + HEALED_S)
    are_answered = all(world.now_s - answered_s < 2 * rules.CALL_S for answered_s in world.answered_s.values())
    return len(world.serving) == 1 and are_answered and set(world.dials.values()) == world.serving


@pytest.mark.seconds
def test_one_syncer_serves_when_all_faults_have_ended() -> None:
    assert [seed for seed in range(500) if not serves_in_the_end(seed)] == []


class Forgets(World):
    """A standby that has taken over is a standby again after a restart."""

    def _start(self, syncer: str) -> None:
        super()._start(syncer)
        self.has_taken_over &= syncer != "S"


class TellsOnce(World):
    """The former primary is told of a takeover only once."""

    def _told(self, *, is_answered: bool) -> None:
        pass


@pytest.mark.seconds
@pytest.mark.parametrize("kind", [Forgets, TellsOnce])
def test_the_search_detects_runs_that_stay_stuck(kind: type[World]) -> None:
    assert not all(serves_in_the_end(seed, kind) for seed in range(200))


def of_the_machine(fleets: Fleets, fleet: Fleet, changed: Fleet = frozenset()) -> Fleets:
    """Return the fleet of the primary's machine, which may be ahead of the standby's log."""
    return Fleets.only(fleet)


def of_the_past(fleets: Fleets, fleet: Fleet, changed: Fleet = frozenset()) -> Fleets:
    """Return the fleet before the event."""
    return fleets


@pytest.mark.seconds
@pytest.mark.parametrize("weaker", [of_the_machine, of_the_past])
def test_the_search_detects_a_primary_that_counts_only_one_fleet(
    monkeypatch: pytest.MonkeyPatch, weaker: Callable[..., Fleets]
) -> None:
    monkeypatch.setattr(Fleets, "or_", weaker)
    assert any(outcome(seed) == "both" for seed in range(1000))
