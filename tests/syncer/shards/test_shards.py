"""A run whose fragments are held by several shards, over the in-memory transport."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lightning_diloco.errors import DiLoCoError
from lightning_diloco.syncer.shards import remote
from lightning_diloco.syncer.shards import store as shard_store
from tests.learner.fleet import Fleet, Learner, assert_exact, finish, until
from tests.storage.faults import POINTS, Faults


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call over the in-memory transport cannot be ended from outside."""
    monkeypatch.setattr(remote, "POLL_S", 0.1)


def end(fleet: Fleet, *learners: Learner) -> None:
    """Let the learners finish; the ledger is exact, nothing is lost, and the last one has the anchors of all shards."""
    finish(*learners)
    summary, digests = fleet.stop(), fleet.digests()
    assert_exact(summary)
    assert summary["tokens_merged"] == summary["tokens_seen"]
    last = next(learner for learner in learners if learner.is_last)
    assert last.digests() == digests


@pytest.mark.parametrize("num_shards", [2, 3])
def test_learners_train_and_end_with_the_anchors_of_all_shards(tmp_path: Path, num_shards: int) -> None:
    with Fleet(tmp_path, num_shards=num_shards) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(12)
        end(fleet, *learners)


def test_a_shard_that_is_started_again_loses_nothing(tmp_path: Path) -> None:
    with Fleet(tmp_path, num_shards=2) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        for _ in range(3):
            fleet.until_commits(4)
            fleet.shards[0].restart()
        fleet.until_commits(6)
        end(fleet, *learners)


def test_while_a_shard_is_away_the_fragments_of_the_others_go_on(tmp_path: Path) -> None:
    with Fleet(tmp_path, num_shards=2) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(4)
        fleet.shards[0].crash()
        until(lambda: fleet.service.missing, "the syncer to notice")
        before, steps = fleet.versions, [learner.steps for learner in learners]
        until(lambda: fleet.versions[0] >= before[0] + 3 and fleet.versions[2] >= before[2] + 3, "commits of shard 0")
        assert fleet.versions[1] <= before[1] + 1, "one may have been decided when the shard ended"
        assert all(learner.steps > then for learner, then in zip(learners, steps, strict=True))
        fleet.shards[0].restart()
        until(lambda: fleet.versions[1] >= before[1] + 3, "commits of shard 1")
        end(fleet, *learners)


def test_a_syncer_that_is_started_again_continues_with_its_shards(tmp_path: Path) -> None:
    with Fleet(tmp_path, num_shards=3) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        for is_clean in (False, True, False):
            fleet.until_commits(4)
            fleet.restart(cleanly=is_clean)
        fleet.until_commits(6)
        end(fleet, *learners)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_shard_that_is_killed_at_any_point_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr(shard_store, "MIN_LOG_BYTES", 0)  # a snapshot every few commits
    monkeypatch.setattr(threading, "excepthook", lambda failed: None)  # it dies in a thread
    with Fleet(tmp_path, num_shards=2) as fleet:
        shard = fleet.shards[0]
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(4)
        for countdown in (0, 2):
            shard.restart(faults=Faults(point, countdown))
            until(lambda: shard.is_dead, f"a crash at {point}")
            shard.restart()
            fleet.until_commits(2)
        end(fleet, *learners)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["append:before", "append:after_payload", "sync:before", "sync:after"])
def test_a_syncer_that_dies_between_the_two_steps_of_a_commit_loses_nothing(tmp_path: Path, point: str) -> None:
    with Fleet(tmp_path, num_shards=3) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(4)
        for countdown in range(3):
            fleet.faults = Faults(point, countdown)
            fleet.restart()
            until(lambda: fleet.service.error is not None, f"a crash at {point}")
            fleet.faults = None
            fleet.restart()
            fleet.until_commits(3)
        end(fleet, *learners)


def test_a_shard_that_dies_with_start_values_gets_them_again(tmp_path: Path) -> None:
    with Fleet(tmp_path, num_shards=2) as fleet:
        shard = fleet.shards[0]
        shard.restart(faults=Faults("snapshot:before_rename", 0))  # its first snapshot are the start values
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        until(lambda: shard.is_dead, "start values")
        assert fleet.service.state.manifest is None
        shard.restart()
        fleet.until_commits(4)
        end(fleet, *learners)


def test_start_values_that_are_not_finite_are_refused_by_the_shard_that_gets_them(tmp_path: Path) -> None:
    with Fleet(tmp_path, num_shards=3) as fleet:
        broken = fleet.learner("broken")
        for param in broken.params.values():
            param.data.flatten()[-1] = float("nan")
        with pytest.raises(DiLoCoError, match="NaN or Inf in the start values"):
            broken.join()
        sound = fleet.learner("sound").go()
        fleet.until_commits(4)
        end(fleet, sound)
