"""Any order of starts, kills, cuts, returns and restarts; hypothesis looks for one that breaks an invariant."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from lightning_diloco.config import RunConfig
from lightning_diloco.simulate import Fleet, Network, Pace, SimulatedLearner


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
    )
    def begin(self, quorum: int, num_fragments: int, staleness: int, upload_s: float, loss: float) -> object:
        config = RunConfig(
            sync_every=2 * num_fragments,
            num_fragments=num_fragments,
            overlap=1,
            quorum=quorum,
            lease_s=5.0,
            max_staleness_versions=staleness,
        )
        network = Network(latency_s=0.05, upload_s=upload_s, download_s=0.3, loss=loss, repeats=loss, jitter=3.0)
        self.fleet = Fleet(config, network=network, seed=1)
        self.names = 0
        learners = [self.start(0.3, 2), self.start(0.5, 3)]
        self.fleet.run_for(4.0)
        return multiple(*learners)

    @rule(target=there, step_s=st.sampled_from([0.2, 0.5, 2.0]), tokens=st.integers(1, 9))
    def join(self, step_s: float, tokens: int) -> SimulatedLearner:
        return self.start(step_s, tokens)

    def start(self, step_s: float, tokens: int) -> SimulatedLearner:
        self.names += 1
        return self.fleet.start(f"l{self.names}", Pace(step_s=step_s, tokens=tokens, jitter=0.1, drain_s=20.0))

    @rule(target=there, old=consumes(there))
    def kill_and_restart(self, old: SimulatedLearner) -> SimulatedLearner:
        self.fleet.run_for(0.3)
        self.fleet.kill(old)
        return self.fleet.start(old.name, Pace(step_s=0.4, tokens=3, starts_s=1.5, drain_s=20.0))

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


class TestAnyLongHistory(AnyHistory.TestCase):
    settings = settings(max_examples=500, stateful_step_count=40, **COMMON)


TestAnyLongHistory = pytest.mark.slow(TestAnyLongHistory)  # type: ignore[misc]
