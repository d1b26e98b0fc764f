"""The rules of primary and standby, and a search for schedules in which both serve."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from lightning_diloco.protocol.syncer import succession as rules
from lightning_diloco.protocol.syncer.succession import Primary, Standby

HEARTBEAT_S, TICK_S, AGAIN_S = 1.0, 0.25, 0.5


# ----------------------------------------------------------------------------------------------------------- the rules


def heard_every(primary: Primary, session: str, period_s: float, until_s: float) -> None:
    now_s = 0.0
    while now_s <= until_s:
        primary.heard(session, now_s)
        now_s += period_s


def test_a_primary_continues_alone_with_half_of_its_learners() -> None:
    primary = Primary(0.0)
    heard_every(primary, "l0", 1.0, rules.STEADY_S)
    assert primary.may_continue_alone(["l0", "l1"], rules.ALONE_S)
    assert not primary.may_continue_alone(["l0", "l1", "l2"], rules.ALONE_S)


def test_a_primary_waits_for_a_standby_that_was_just_heard() -> None:
    primary = Primary(0.0)
    heard_every(primary, "l0", 1.0, 2 * rules.STEADY_S)
    primary.heard_standby(rules.STEADY_S + 1.0)
    assert not primary.may_continue_alone(["l0"], 2 * rules.STEADY_S)
    assert primary.may_continue_alone(["l0"], 2 * rules.STEADY_S + 1.0)


def test_a_learner_that_paused_does_not_count_for_the_primary() -> None:
    primary = Primary(0.0)
    heard_every(primary, "l0", rules.PAUSE_S + 0.1, 3 * rules.STEADY_S)
    assert not primary.may_continue_alone(["l0"], 3 * rules.STEADY_S)


def test_a_primary_without_learners_continues_alone() -> None:
    assert Primary(0.0).may_continue_alone([], rules.ALONE_S)


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


@dataclass
class World:
    """Two syncers and learners in virtual time, on a network that is cut at random.

    A call takes up to CALL_S, or fails after it. Learners dial as `learner/rotation.py` does. Some worlds have slow
    calls, and some are calmer than others.
    """

    num_learners: int
    seed: int
    now_s: float = 0.0
    cut: set[frozenset[str]] = field(default_factory=set)
    down: set[str] = field(default_factory=set)
    is_alone: bool = False
    has_taken_over: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.slow, self.calm_s = self._random.choice((0.0, 0.02, 0.5)), self._random.choice((3.0, 10.0, 30.0))
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.names = [f"l{k}" for k in range(self.num_learners)]
        self.primary, self.standby = Primary(0.0), Standby()
        self.answered_s = dict.fromkeys(self.names, 0.0)
        self.dialled_s = dict.fromkeys(self.names, -rules.CALL_S)
        self.dials = dict.fromkeys(self.names, "P")
        self._follow()
        for name in self.names:
            self._beat(name)
        self._disturb()
        self._decide()

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        self._count += 1
        self._queue.append((self.now_s + delay_s, self._count, do))

    def run(self, until_s: float) -> None:
        while self._queue and not (self.is_alone and self.has_taken_over):
            self._queue.sort()
            at_s, _, do = self._queue.pop(0)
            if at_s > until_s:
                return
            self.now_s = at_s
            do()

    def _reaches(self, a: str, b: str) -> bool:
        return not {a, b} & self.down and frozenset((a, b)) not in self.cut

    def _disturb(self) -> None:
        """Cut or mend a connection, or stop or start a syncer."""
        nodes = ["P", "S", *self.names]
        if self._random.random() < 0.3:
            self.down ^= {"P"}
            if "P" not in self.down:
                self.primary = Primary(self.now_s)  # a restart
        else:
            self.cut ^= {frozenset(self._random.sample(nodes, 2))}
        if self._random.random() < 0.1:
            self.cut, self.down = set(), set()
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

    def _follow(self) -> None:
        """The standby follows the primary."""
        sent_s, counts = self.now_s, not self.is_alone

        def arrives() -> bool:
            if not self.is_alone:
                self.primary.heard_standby(self.now_s)
            return not self.is_alone and not self.has_taken_over

        def ends(is_answered: bool) -> None:
            if is_answered and counts:
                self.standby.answered(sent_s, self.now_s)
            self.after(0.2, self._follow)

        self._call("S", "P", arrives, ends)

    def _beat(self, name: str) -> None:
        """A learner calls the syncer that it dials."""
        where = self.dials[name]

        def arrives() -> bool:
            if where == "P":
                if self.has_taken_over:
                    return False
                self.primary.heard(name, self.now_s)
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
        if "P" not in self.down and self.primary.may_continue_alone(self.names, self.now_s):
            self.is_alone = True
        if self.standby.may_take_over(self.names, self.now_s):
            self.has_taken_over = True
        self.after(TICK_S, self._decide)


def outcome(seed: int) -> str:
    world = World(num_learners=1 + seed % 5, seed=seed)
    world.run(200.0)
    kind = {(0, 0): "neither", (1, 0): "alone", (0, 1): "taken over", (1, 1): "both"}
    return kind[int(world.is_alone), int(world.has_taken_over)]


def test_no_schedule_lets_both_serve() -> None:
    found = Counter(map(outcome, range(200)))
    assert found["both"] == 0, found
    assert min(found["alone"], found["taken over"], found["neither"]) > 20, f"the search must reach all cases: {found}"


@pytest.mark.parametrize(
    "weaker", [{"STEADY_S": 0.0, "ALONE_S": 3.0}, {"FRESH_S": 1000.0}, {"PAUSE_S": 100.0}], ids=lambda w: next(iter(w))
)
def test_the_search_finds_weaker_rules(monkeypatch: pytest.MonkeyPatch, weaker: dict[str, float]) -> None:
    for name, value in weaker.items():
        monkeypatch.setattr(rules, name, value)
    assert any(outcome(seed) == "both" for seed in range(200))
