"""Work that the norm guard cuts off is not lost: weights and ledger are compared with undisturbed training.

With one learner, outer_lr=1 and no outer momentum, the final anchor equals the learner's trained parameters.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_diloco.errors import RefusedError
from lightning_diloco.syncer.norm_guard import MIN_SAMPLES, NORM_GUARD, SCALE_DOWN, Limit, NormGuard
from tests.learner.fleet import OPTIONS, Fleet, Learner, assert_exact, finish, until

ALONE = {**OPTIONS, "outer_lr": 1.0, "outer_momentum": 0.0}


class Watched(Learner):
    """A learner, and a copy of its parameters that takes the same steps without a run."""

    def join(self) -> Watched:
        super().join()
        self.undisturbed = {name: param.detach().clone() for name, param in self.params.items()}
        return self

    def step(self) -> None:
        super().step()
        for name, param in self.undisturbed.items():
            param.lerp_(self.target[name], 0.02)

    def jump(self, by: float) -> None:
        """Make an unusually large step."""
        self.link.settle()
        for name, param in self.undisturbed.items():
            param.add_(by)
            self.params[name].data.add_(by)

    def until_commits(self, fleet: Fleet, more: int) -> None:
        wanted = fleet.num_commits + more
        until(lambda: self.step() or fleet.num_commits >= wanted, f"{wanted} commits")

    def end(self, fleet: Fleet) -> float:
        """Drain; return the greatest difference of a parameter between the anchor and undisturbed training."""
        self.finish()
        plan, values = self.link.plan, fleet.published()
        anchors = {name: torch.empty(shape) for name, shape in self.shapes.items()}
        for p in range(plan.num_fragments):
            for entry in plan.layout(p, fleet.service.state.config.block_size).entries:
                entry.slice.of(anchors[entry.slice.name]).copy_(entry.of(values[p]).view(entry.shape))
        return max(float((anchors[name] - self.undisturbed[name]).abs().max()) for name in anchors)


def watched(fleet: Fleet) -> Watched:
    learner = Watched(fleet, "l0")
    fleet.learners.append(learner)
    return learner.join()


@pytest.mark.seconds
def test_work_of_an_outage_is_merged_completely(tmp_path: Path) -> None:
    with Fleet(tmp_path, run_options=ALONE) as fleet:
        learner = watched(fleet)
        learner.until_commits(fleet, 3 * MIN_SAMPLES)
        learner.wire.is_cut = True
        until(lambda: learner.wire.num_failed > 0, "the outage")
        learner.target = {name: -value for name, value in learner.target.items()}
        for _ in range(200):
            learner.step()
        learner.wire.is_cut = False
        # A hundredth of the long contribution remains as rounding error, which later rounds merge.
        learner.until_commits(fleet, 10 * learner.link.plan.num_fragments)
        assert learner.end(fleet) < 0.02
        (member,) = fleet.service.state.roster.members.values()
        assert member.num_clipped == 0
        assert_exact(fleet.stop())


@pytest.mark.seconds
@pytest.mark.parametrize("seed", [0, 1])
def test_cut_off_work_goes_into_the_next_contributions(tmp_path: Path, seed: int) -> None:
    with Fleet(tmp_path, run_options=ALONE) as fleet:
        learner = watched(fleet)
        learner.until_commits(fleet, 3 * MIN_SAMPLES)
        learner.jump(40.0 + seed)
        learner.until_commits(fleet, 30)
        assert learner.end(fleet) < 0.5  # of 40
        (member,) = fleet.service.state.roster.members.values()
        assert member.num_clipped > 0
        summary = fleet.stop()
        assert_exact(summary)
        assert summary["tokens_merged"] == summary["tokens_seen"]


@pytest.mark.seconds
def test_weights_that_move_after_a_long_pause_are_merged_completely(tmp_path: Path) -> None:
    with Fleet(tmp_path, run_options=ALONE) as fleet:
        learner = watched(fleet)
        wanted, learner.target = learner.target, {name: param.detach() for name, param in learner.undisturbed.items()}
        learner.until_commits(fleet, 3 * MIN_SAMPLES * learner.link.plan.num_fragments)
        learner.target = wanted
        learner.until_commits(fleet, 30)
        assert learner.end(fleet) < 0.05
        (member,) = fleet.service.state.roster.members.values()
        assert member.num_clipped == 0
        assert_exact(fleet.stop())


@pytest.mark.seconds
def test_a_newcomer_with_a_rate_that_is_too_high_gets_the_reason_of_its_refusal(tmp_path: Path) -> None:
    """Two contributions are not enough for quarantine."""
    with Fleet(tmp_path) as fleet:
        stays, leaves = (fleet.learner(name).go() for name in ("l0", "l1"))
        known = fleet.service._durable.past.usual._recent
        until(lambda: all({"l0", "l1"} <= known.get(p, {}).keys() for p in range(3)), "norms of both in all fragments")
        finish(leaves)
        late = fleet.learner("late").join()
        late.target = {name: 1e4 * value for name, value in late.target.items()}
        with pytest.raises(RefusedError) as refused:
            until(late.step, "the error")
        late.link.close()
        finish(stays)
    assert "is accepted; its learning rate may be too high, because its schedule began anew" in str(refused.value)
    assert "a schedule by epochs begins anew in a learner that finds no checkpoint" in str(refused.value)


def taught(**norms: float) -> NormGuard:
    """Return a guard after MIN_SAMPLES contributions of each learner to fragment 0, of four steps each."""
    usual = NormGuard()
    for learner, norm in norms.items():
        usual.learn(0, [learner] * MIN_SAMPLES, [norm] * MIN_SAMPLES, [4] * MIN_SAMPLES, [1.0] * MIN_SAMPLES)
    return usual


def test_limit_depends_on_other_learners_norms_for_the_same_work() -> None:
    usual = taught(a=2.0, b=2.0)

    assert usual.limit(0, "mad", 4, {"mad": (1e30, 4)}) == Limit(SCALE_DOWN * 2.0, NORM_GUARD * 2.0, 2.0, 2)
    assert usual.limit(0, "mad", 40, {}).refused == NORM_GUARD * 20.0, "ten times the steps"
    assert usual.limit(0, "mad", 1, {}).refused == NORM_GUARD * 1.0, "a quarter of the steps, half the length"
    assert usual.limit(1, "mad", 4, {}).norm == float("inf"), "nothing is known of this fragment"


def test_one_learner_does_not_change_the_limits_of_the_others() -> None:
    for length in (1e30, 1e-30):
        assert taught(a=2.0, b=2.0, mad=length).limit(0, "a", 4, {}).refused >= NORM_GUARD * 2.0


def test_a_learner_with_longer_contributions_may_keep_them_up_to_a_limit() -> None:
    assert taught(a=2.0, b=2.0, long=15.0).limit(0, "long", 4, {}).refused == NORM_GUARD * 15.0
    assert taught(a=2.0, b=2.0, mad=1e30).limit(0, "mad", 4, {}).refused == NORM_GUARD**2 * 2.0


def test_scaled_contributions_do_not_change_usual_norms() -> None:
    usual = taught(a=2.0)
    usual.learn(0, ["mad"] * 99, [1e30] * 99, [4] * 99, [1e-29] * 99)

    assert usual.limit(0, "mad", 4, {}).norm == NORM_GUARD * 2.0
    assert usual.limit(0, "a", 4, {}).norm == NORM_GUARD * 2.0, "by its own past: the other one has none"


def test_in_the_first_rounds_the_contributions_to_the_same_round_set_the_limit() -> None:
    present = {"a": (1.0, 4), "b": (2.0, 4), "mad": (1e30, 4)}

    assert NormGuard().limit(0, "mad", 4, present).refused == NORM_GUARD * 2.0
    assert NormGuard().limit(0, "a", 4, present).refused >= NORM_GUARD * 2.0


def test_newcomers_with_short_contributions_do_not_limit_older_learners() -> None:
    usual = taught(old=1.0)
    warming_up = {"new": (1e-3, 4), "newer": (1e-3, 4), "old": (1.0, 4)}

    assert usual.limit(0, "old", 4, warming_up).refused >= NORM_GUARD * 1.0


def test_with_two_learners_the_longer_contribution_is_scaled_down_and_not_refused() -> None:
    limit = taught(a=2.0, mad=1e30).limit(0, "mad", 4, {})

    assert (limit.norm, limit.refused) == (NORM_GUARD**2 * 2.0, float("inf"))
    assert taught(a=2.0).limit(0, "mad", 4, {}).norm == NORM_GUARD * 2.0, "it has no past of its own"


def test_a_single_learner_is_limited_by_its_own_history() -> None:
    usual = NormGuard()
    usual.learn(0, ["a"] * (MIN_SAMPLES - 1), [2.0] * (MIN_SAMPLES - 1), [4] * 7, [1.0] * 7)
    assert usual.limit(0, "a", 4, {"a": (1.0, 4)}).norm == float("inf")
    usual.learn(0, ["a"], [2.0], [4], [0.5])
    assert usual.limit(0, "a", 4, {}).norm == NORM_GUARD * 2.0


def decayed(*learners: str, to: float) -> NormGuard:
    """Return a guard to which these learners sent norms of 2 in four steps, then smaller ones."""
    usual = taught(**dict.fromkeys(learners, 2.0))
    for learner in learners:
        usual.learn(0, [learner] * 99, [to] * 99, [4] * 99, [1.0] * 99)
    return usual


@pytest.mark.parametrize("others", [("a",), ("a", "b"), ("late",)])
def test_work_from_before_a_decay_is_not_cut_to_nothing(others: tuple[str, ...]) -> None:
    """Before, with a second learner that had converged, late work was scaled down to 3e-7 in each round."""
    limit = decayed(*others, to=1e-9).limit(0, "late", 400, {"late": (8.0, 400)})

    assert limit.norm >= 8.0, "a twenty-fifth of the steps' usual length before the decay"
    assert limit.refused >= 8.0
    assert limit.norm <= NORM_GUARD * 0.01 * 200.0 * (1 + 1e-9), "but ten times the hundredth part at most"


def test_norms_of_zero_do_not_count() -> None:
    usual = decayed("a", to=0.0)
    assert usual.limit(0, "a", 4, {}).norm == NORM_GUARD * 2.0, "as before"

    frozen = taught(a=0.0)
    frozen.learn(0, ["a"], [1e-3], [400], [1.0])  # it moved only in the last step
    assert frozen.limit(0, "a", 400, {}) == Limit(), "one norm is not enough"


def test_a_learner_that_only_sent_zeros_has_no_usual_norm() -> None:
    assert taught(a=0.0).limit(0, "a", 4, {}) == Limit()
    assert taught(a=0.0, b=0.0, c=0.0).limit(0, "a", 4, {}) == Limit()
