"""The syncer's disk while learners run, and its arithmetic."""

from __future__ import annotations

import errno
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.errors import ConfigError, PlanMismatchError
from lightning_diloco.learner import join as joining
from lightning_diloco.learner import member
from lightning_diloco.manifest import make_manifest
from lightning_diloco.protocol import actions, events, messages
from lightning_diloco.protocol.syncer import records, rounds
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.storage import snapshots
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.syncer import service
from lightning_diloco.syncer.anchors import AnchorStore
from lightning_diloco.syncer.contribution_archive import Recorder
from lightning_diloco.syncer.merge_worker import DurableCommit, MergeWorker
from lightning_diloco.syncer.payloads import Payloads
from lightning_diloco.syncer.process import SyncerOptions, _address_and_identity
from lightning_diloco.syncer.shards.shard import MergeJob, OwnShard
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.address import write_join_file
from tests.learner.fleet import DEADLINE_S, OPTIONS, Fleet, finish, until


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the syncer retry its disk after a short time."""
    monkeypatch.setattr(service, "RETRY_S", 0.1)
    monkeypatch.setattr(rounds, "RETRY_COMMIT_S", 0.1)


class FullDisk:
    """A disk on which writes fail while `is_full`."""

    def __init__(self, *points: str) -> None:
        self.points = points or ("append:before",)
        self.is_full = False
        self.num_refused = 0

    def __call__(self, point: str) -> None:
        if self.is_full and point in self.points:
            self.num_refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")

    def until_tried_anew(self) -> None:
        """Wait until all writes in progress at this call, and a later one, have failed."""
        wanted = self.num_refused + OPTIONS["num_fragments"] + 1
        until(lambda: self.num_refused >= wanted, "another try")


@pytest.mark.seconds
def test_full_disk_suspends_only_commits(tmp_path: Path) -> None:
    disk = FullDisk()
    with Fleet(tmp_path, faults=disk) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(3)
        disk.is_full = True
        until(lambda: fleet.status()["state"] == "suspended", "saying so")
        disk.until_tried_anew()
        commits, steps = fleet.num_commits, [learner.steps for learner in learners]
        disk.until_tried_anew()
        status = fleet.status()
        assert "No space left" in status["reason"]
        assert "free some space" in status["reason"]
        assert fleet.num_commits == commits
        until(lambda: all(x.steps > before for x, before in zip(learners, steps, strict=True)), "steps of both")
        disk.is_full = False
        fleet.until_commits(3)
        assert fleet.status()["reason"] is None
        finish(*learners)
        summary = fleet.stop()
    assert summary["ledger_exact"]
    assert summary["tokens_merged"] == summary["tokens_seen"]


@pytest.mark.seconds
def test_waiting_actions_do_not_accumulate_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "GOODBYE_S", DEADLINE_S)  # independent of the speed of the other one's steps
    disk = FullDisk()
    with Fleet(tmp_path, faults=disk) as fleet:
        staying, leaving = fleet.learner("staying").go(), fleet.learner("leaving").join()
        fleet.until_commits(3)
        disk.is_full = True
        closing_ = leaving.aside(leaving.link.close)  # sends its leave ten times a second
        until(lambda: fleet.service._todo, "a record that has to wait")
        steps = staying.steps
        until(lambda: staying.steps >= steps + 300, "steps, each of which asks for rounds")
        assert len(fleet.service._todo) < 40, "what two learners can have to say about three fragments"
        disk.is_full = False
        closing_.result()
        until(lambda: fleet.service.state.roster.in_state("left"), "the leave")
        staying.enough().done()
        assert fleet.stop()["ledger_exact"]


@pytest.mark.seconds
def test_a_restart_during_snapshots_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MIN_LOG_BYTES", 0)  # state and log are small: a snapshot every few commits
    with Fleet(tmp_path) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        until(lambda: fleet.service._durable.log.first_lsn > 1, "a snapshot that let the log drop its start")
        fleet.until_commits(20)
        finish(*learners)
        summary, before = fleet.stop(), (fleet.versions, fleet.service._store.digests())
        totals = fleet.service.state.ledger.totals()
        fleet.restart()
        assert (fleet.versions, fleet.service._store.digests()) == before
        assert fleet.service.state.ledger.totals() == totals
    assert summary["ledger_exact"]


def test_commits_continue_on_a_disk_without_space_for_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MIN_LOG_BYTES", 0)
    disk = FullDisk("rotate:before", "snapshot:before_rename")
    with Fleet(tmp_path, faults=disk) as fleet:
        learner = fleet.learner("l0").go()
        until(lambda: fleet.service.state.manifest, "the seed")
        disk.is_full = True
        until(lambda: disk.num_refused == 1, "an attempt at a snapshot")
        fleet.until_commits(9)
        assert disk.num_refused == 1, "not tried again at every commit"
        learner.enough().done()
        assert fleet.stop()["ledger_exact"]


# --------------------------------------------------------------------------------------------------------- arithmetic

SHAPES = {"a": (8, 16)}
CONFIG = RunConfig(sync_every=4, num_fragments=1, overlap=1, block_size=16, wire="bf16", merge="rda")
PLAN = FragmentPlan.balanced(SHAPES, num_fragments=1, max_slice_numel=1 << 20)


class Arithmetic:
    """A merge worker with contributions of a given size, on a separate disk."""

    def __init__(self, run_dir: Path) -> None:
        self.durable = SyncerStore(run_dir)
        self.disk_errors: list[str] = []
        self.store = AnchorStore(PLAN, CONFIG)
        self.store.seed(0, torch.zeros(128))
        self.shard = OwnShard(Payloads(), Recorder(run_dir))
        self.shard.anchors = self.store
        self.merger = MergeWorker([self.shard], self.durable, False, self.disk_errors.append)

    def job(self, *sizes: float) -> MergeJob:
        ready = messages.Ready(fragment=0, seq=1, base=0, generation=0, start=0, stop=8, steps=4)
        chosen = tuple(actions.Contribution(f"s{k}", f"l{k}", 1, ready, ready.steps) for k in range(len(sizes)))
        payloads = tuple(torch.full((128,), size).to(torch.bfloat16).view(torch.uint8) for size in sizes)
        return MergeJob(actions.Merge(0, 1, chosen, (1 / len(sizes),) * len(sizes)), payloads)

    def apply(self) -> actions.Apply:
        return actions.Apply(records.CommitRecord(0, 0, 1, 1, 1.0, 1, ()))


def test_finite_contributions_with_an_infinite_sum_lose_the_longest(tmp_path: Path) -> None:
    at = Arithmetic(tmp_path)
    job = at.job(2e38, 3e38)
    job.payloads[1].view(torch.bfloat16)[1:] *= -1  # all coordinates but one cancel, and this one gets the whole length
    refused, merged = at.merger.merge(job)
    assert isinstance(refused, events.PayloadReceived)
    assert isinstance(merged, events.Merged)
    assert (refused.session, merged.kept) == ("s1", {})
    assert "the longest of 2" in str(refused.error)
    at.durable.close()


def test_gradient_that_overflows_the_momentum_is_not_committed(tmp_path: Path) -> None:
    at = Arithmetic(tmp_path)
    at.store._anchors[0].momentum.fill_(3.3e38)
    (merged,) = at.merger.merge(at.job(3e38))
    assert isinstance(merged, events.Merged)
    assert merged.kept == {}
    failed, refused = at.merger.commit(at.apply())
    assert isinstance(failed, events.CommitFailed)
    assert isinstance(refused, events.PayloadReceived)
    assert (at.durable.log.last_lsn, at.disk_errors) == (0, [])
    at.durable.close()


def test_contribution_far_above_the_usual_norm_is_scaled_down(tmp_path: Path) -> None:
    at = Arithmetic(tmp_path)
    at.durable.past.usual.learn(0, ["l1"] * 8, [1.0] * 8, [4] * 8, [1.0] * 8)
    at.merger.merge(at.job(1000.0))
    (made,) = at.merger.commit(at.apply())
    assert isinstance(made, DurableCommit)
    assert torch.linalg.vector_norm(made.prepared.anchor.momentum).item() == pytest.approx(10.0, rel=0.01)
    at.durable.close()


def test_the_usual_norm_survives_a_restart_of_the_syncer(tmp_path: Path) -> None:
    before = SyncerStore(tmp_path)
    for version in range(8):
        before.note("outer", fragment=0, version=version, learners=["l1"], norms=[1.0], steps=[4], kept=[1.0])
    before.close()

    at = Arithmetic(tmp_path)
    at.durable.restore(SyncerState(run="run"), 0.0)
    at.merger = MergeWorker([at.shard], at.durable, None, at.disk_errors.append)
    (merged,) = at.merger.merge(at.job(1000.0))
    assert isinstance(merged, events.Merged)
    assert merged.kept == {"s0": pytest.approx(10 / (1000 * 128**0.5), rel=0.01)}
    at.durable.close()


# --------------------------------------------------------------------------------------------------------------- seed


@pytest.mark.parametrize("broken", [{"plan_digest": "0" * 64}, {"shapes": {"a": [4, 4]}}, {"shapes": 3}])
def test_a_seed_whose_plan_differs_from_its_digest_is_rejected_without_other_effects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: dict[str, object]
) -> None:
    def forged(*args: object) -> tuple[dict[str, object], FragmentPlan]:
        manifest, plan = make_manifest(*args)
        return {**manifest, **broken}, plan

    with Fleet(tmp_path) as fleet:
        monkeypatch.setattr(joining, "make_manifest", forged)
        with pytest.raises((PlanMismatchError, ConfigError), match="do both sides run the same version"):
            fleet.learner("forger").join()
        monkeypatch.undo()
        assert fleet.service.error is None


# ------------------------------------------------------------------------------------------------------ run directory


def test_a_run_directory_without_its_log_or_its_join_string_is_not_opened(tmp_path: Path) -> None:
    options = SyncerOptions(run_dir=tmp_path)
    address, _ = _address_and_identity(options)
    write_join_file(tmp_path / "join", address)
    with pytest.raises(ConfigError, match=r"log is not: .* --reseed"):
        _address_and_identity(options)
    assert _address_and_identity(replace(options, reseed=True))[0].token == address.token

    with closing(RedoLog(tmp_path / "syncer" / "log")) as log:
        assert _address_and_identity(options)[0] == address
        (tmp_path / "join").unlink()
        fresh, _ = _address_and_identity(options)  # interrupted before any learner could join
        assert fresh.token != address.token
        log.append({"kind": "any"})
    with pytest.raises(ConfigError, match="join is not"):
        _address_and_identity(options)
