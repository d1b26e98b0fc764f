"""Any order of starts, kills, cuts, returns and restarts; hypothesis looks for one that breaks an invariant.

Messages are lost, repeated and overtake each other; learners and the syncer are killed (the syncer between any two of
its actions), cut off, sent away, or evaluate; the disk fills up or is rolled back. With a rule of a machine broken on
purpose, a history that shows it is found.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from lightning_diloco.config import RunConfig
from lightning_diloco.simulate import Data, Fleet, Network, Pace, SimulatedLearner
from tests.simulate import test_sabotage as sabotages

TEXT = Data(sizes=(90,), range_size=8)
STREAM = Data(sizes=(33, 0, 50), range_size=8, is_stream=True)


class AnyHistory(RuleBasedStateMachine):
    """Versions only grow, no round closes below its quorum, books balance, a restart finds what was there."""

    there = Bundle("there")
    away = Bundle("away")

    @initialize(
        target=there,
        quorum=st.integers(1, 3),
        num_fragments=st.integers(1, 3),
        staleness=st.sampled_from([1, 4]),
        upload_s=st.sampled_from([0.1, 3.0]),
        loss=st.sampled_from([0.0, 0.2]),
        guard=st.sampled_from([0.0, 0.3]),
        data=st.sampled_from([TEXT, STREAM]),
    )
    def begin(
        self, *, quorum: int, num_fragments: int, staleness: int, upload_s: float, loss: float, guard: float, data: Data
    ) -> object:
        self.data = data
        config = RunConfig(
            sync_every=2 * num_fragments,
            num_fragments=num_fragments,
            overlap=1,
            quorum=quorum,
            lease_s=5.0,
            max_staleness_versions=staleness,
        )
        network = Network(latency_s=0.05, upload_s=upload_s, download_s=0.3, loss=loss, repeats=loss, jitter=3.0)
        self.fleet = Fleet(config, network=network, seed=1, guard=guard)
        self.names = 0
        learners = [self.start(0.3, 2), self.start(0.5, 3)]
        self.fleet.run_for(4.0)
        return multiple(*learners)

    @rule(target=there, step_s=st.sampled_from([0.2, 0.5, 2.0]), tokens=st.integers(1, 9))
    def join(self, step_s: float, tokens: int) -> SimulatedLearner:
        return self.start(step_s, tokens)

    def start(self, step_s: float, tokens: int) -> SimulatedLearner:
        self.names += 1
        pace = Pace(step_s=step_s, tokens=tokens, jitter=0.1, drain_s=20.0, data=self.data)
        return self.fleet.start(f"l{self.names}", pace)

    @rule(target=there, old=consumes(there))
    def kill_and_restart(self, old: SimulatedLearner) -> SimulatedLearner:
        self.fleet.run_for(0.3)
        self.fleet.kill(old)
        return self.fleet.start(old.name, Pace(step_s=0.4, tokens=3, starts_s=1.5, drain_s=20.0, data=self.data))

    @rule(target=away, learner=consumes(there))
    def cut(self, learner: SimulatedLearner) -> SimulatedLearner:
        self.fleet.cut(learner)
        self.fleet.run_for(1.0)
        return learner

    @rule(target=there, learner=consumes(away))
    def heal(self, learner: SimulatedLearner) -> SimulatedLearner:
        self.fleet.heal(learner)
        self.fleet.run_for(1.0)
        return learner

    @rule(learner=consumes(there))
    def finish(self, learner: SimulatedLearner) -> None:
        if learner.is_stepping:
            self.fleet.finish(learner)

    @rule(learner=there)
    def spoil_the_next_payload(self, learner: SimulatedLearner) -> None:
        learner.bad_payload = True

    @rule(use_snapshot=st.booleans())
    def restart_the_syncer(self, use_snapshot: bool) -> None:
        self.fleet.restart_syncer(use_snapshot=use_snapshot)
        self.fleet.run_for(0.7)

    @rule(nth=st.integers(1, 12))
    def kill_the_syncer_between_two_actions(self, nth: int) -> None:
        self.fleet.crashes.arm("", nth)
        self.fleet.run_for(1.0)

    @rule(learner=there, for_s=st.sampled_from([1.0, 6.0]))
    def evaluate(self, learner: SimulatedLearner, for_s: float) -> None:
        if learner.is_stepping and learner.state is not None and learner.state.phase == "stepping":
            self.fleet.evaluate(learner, for_s)

    @rule(for_s=st.sampled_from([0.5, 4.0]))
    def fill_the_disk_for_a_while(self, for_s: float) -> None:
        self.fleet.disk_is_full = True
        self.fleet.run_for(for_s)
        self.fleet.disk_is_full = False

    @rule()
    def take_a_snapshot(self) -> None:
        self.fleet.disk.take_snapshot(self.fleet.syncer)

    @rule(num_records=st.integers(1, 8))
    def roll_the_disk_back(self, num_records: int) -> None:
        self.fleet.restart_syncer(lose=num_records)
        self.fleet.run_for(0.7)

    @rule(for_s=st.sampled_from([0.3, 2.0, 8.0]))
    def let_time_pass(self, for_s: float) -> None:
        self.fleet.run_for(for_s)  # every event in it is checked

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.invariants.audit()

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        for learner in self.fleet.learners.values():
            if learner.is_cut:
                self.fleet.heal(learner)
        self.fleet.run_for(8.0)
        for learner in list(self.fleet.learners.values()):
            if learner.is_stepping and not learner.is_gone:
                self.fleet.finish(learner)
        self.fleet.run_for(40.0)
        self.fleet.invariants.audit()
        self.fleet.syncer.finish()
        totals = self.fleet.syncer.ledger.totals()
        assert totals.pending == 0
        assert totals.is_exact


COMMON = {"suppress_health_check": list(HealthCheck), "derandomize": True, "deadline": None}

TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=15, stateful_step_count=25, **COMMON)


@pytest.mark.slow
class TestAnyLongHistory(AnyHistory.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40, **COMMON)


@pytest.mark.slow
@pytest.mark.thorough
class TestMoreLongHistories(AnyHistory.TestCase):
    settings = settings(max_examples=500, stateful_step_count=40, **COMMON)


@pytest.mark.parametrize(
    "sabotage",
    [
        sabotages.commit_is_booked_twice,
        sabotages.undrained_tokens_are_forgotten,
        sabotages.a_superseded_range_is_dropped,
        sabotages.a_landed_merge_is_not_taken_off_the_parameters,
        sabotages.a_restart_forgets_the_fates,
    ],
)
def test_a_machine_with_one_rule_broken_is_found_out(sabotage, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    sabotage(monkeypatch)
    looking = settings(max_examples=60, stateful_step_count=25, phases=[Phase.generate], **COMMON)
    with pytest.raises((AssertionError, ValueError)):
        run_state_machine_as_test(AnyHistory, settings=looking)
