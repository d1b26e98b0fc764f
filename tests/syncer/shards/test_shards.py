"""A run with several shards, over the in-memory transport."""

from __future__ import annotations

import errno
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.errors import DiLoCoError
from lightning_diloco.protocol.syncer import rounds
from lightning_diloco.storage import snapshots
from lightning_diloco.syncer import service
from lightning_diloco.syncer.shards import process, remote
from lightning_diloco.syncer.shards.layout import tell_token
from lightning_diloco.syncer.shards.remote import RemoteShard
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk
from tests.learner.fleet import OPTIONS, Fleet, Learner, assert_exact, finish, until
from tests.storage.faults import POINTS, Faults


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits, because a call over the in-memory transport cannot be interrupted."""
    monkeypatch.setattr(remote, "POLL_S", 0.1)


SIX = {**OPTIONS, "num_fragments": 6, "max_slice_numel": 64}  # so that a shard has several fragments


class FullDisk:
    """A disk that fails at these points while `is_full`.

    Args:
        points: see `Faults`.
        refuses: called before each refusal.
    """

    def __init__(self, *points: str, refuses: Callable[[], object] = lambda: None) -> None:
        self._points, self._refuses = points, refuses
        self.is_full = False
        self.num_refused = 0

    def __call__(self, point: str) -> None:
        if self.is_full and point in self._points:
            self._refuses()
            self.num_refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")


def end(fleet: Fleet, *learners: Learner) -> None:
    """Let the learners finish; check the ledger, and that the last learner has the anchors of all shards."""
    finish(*learners)
    summary, digests = fleet.stop(), fleet.digests()
    assert_exact(summary)
    assert summary["tokens_merged"] == summary["tokens_seen"]
    last = next(learner for learner in learners if learner.is_last)
    assert last.digests() == digests


def miss_a_generation(fleet: Fleet) -> None:
    """Kill the first shard, and begin a generation while it is away."""
    fleet.shards[0].crash()
    until(lambda: fleet.service.missing, "the syncer to notice")
    with fleet.service._board.looking:
        fleet.service.state._outlived = 0  # as if a learner had proved a lost version
    until(lambda: fleet.service.state.rounds.generation == 1, "a new generation")


@pytest.mark.seconds
@pytest.mark.parametrize("num_shards", [2, 3])
def test_learners_train_and_end_with_the_anchors_of_all_shards(tmp_path: Path, num_shards: int) -> None:
    with Fleet(tmp_path, num_shards=num_shards) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(12)
        end(fleet, *learners)


@pytest.mark.seconds
def test_a_shard_that_is_started_again_loses_nothing(tmp_path: Path) -> None:
    with Fleet(tmp_path, num_shards=2) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        for _ in range(3):
            fleet.until_commits(4)
            fleet.shards[0].restart()
        fleet.until_commits(6)
        end(fleet, *learners)


@pytest.mark.parametrize(
    ("told", "counted"),
    [
        ([(0, 0), (10, 5), (30, 6)], (30, 6)),
        ([(100, 50), (110, 55)], (10, 5)),  # the shard is older than this syncer
        ([(0, 0), (10, 5), (3, 1), (4, 4)], (14, 9)),  # the shard was started again
    ],
)
def test_bytes_of_a_shard_are_counted_once(
    monkeypatch: pytest.MonkeyPatch, told: list[tuple[int, int]], counted: tuple[int, int]
) -> None:
    shard = RemoteShard((1, 2), address=lambda: ":1", connect=lambda: None, key="")  # type: ignore[arg-type,return-value]
    for up, down in told:
        answer = Bulk({"pid": 1, "bytes_up": up, "bytes_down": down}, memoryview(b""))
        monkeypatch.setattr(shard, "_call", lambda request, within_s, answer=answer: answer)
        shard._count()
    assert (shard.bytes_up, shard.bytes_down) == counted


@pytest.mark.seconds
def test_fragments_of_other_shards_continue_while_a_shard_is_away(tmp_path: Path) -> None:
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


@pytest.mark.seconds
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
    monkeypatch.setattr(snapshots, "MIN_LOG_BYTES", 0)  # a snapshot every few commits
    monkeypatch.setattr(threading, "excepthook", lambda failed: None)  # it is killed in a thread
    with Fleet(tmp_path, num_shards=2, run_options=SIX) as fleet:
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
    with Fleet(tmp_path, num_shards=3, run_options=SIX) as fleet:
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


@pytest.mark.seconds
def test_a_shard_that_dies_with_start_values_gets_them_again(tmp_path: Path) -> None:
    with Fleet(tmp_path, num_shards=2) as fleet:
        shard = fleet.shards[0]
        shard.restart(faults=Faults("snapshot:before_rename", 0))  # its first snapshot has the start values
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        until(lambda: shard.is_dead, "start values")
        assert fleet.service.state.manifest is None
        shard.restart()
        fleet.until_commits(4)
        end(fleet, *learners)


@pytest.mark.seconds
def test_a_shard_refuses_start_values_that_are_not_finite(tmp_path: Path) -> None:
    with Fleet(tmp_path, num_shards=3) as fleet:
        broken = fleet.learner("broken")
        for param in broken.params.values():
            param.data.flatten()[-1] = float("nan")
        with pytest.raises(DiLoCoError, match="NaN or Inf in the start values"):
            broken.join()
        sound = fleet.learner("sound").go()
        fleet.until_commits(4)
        end(fleet, sound)


@pytest.mark.seconds
def test_a_full_disk_of_a_shard_suspends_its_fragments_until_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MIN_LOG_BYTES", 0)
    monkeypatch.setattr(rounds, "RETRY_COMMIT_S", 0.1)
    disk = FullDisk("append:before", "snapshot:before")
    with Fleet(tmp_path, num_shards=2, run_options=SIX) as fleet:
        fleet.shards[0].restart(faults=disk)
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(12)
        disk.is_full = True
        until(lambda: disk.num_refused >= 4, "refused writes")
        fleet.until_commits(6)  # of the other shard
        assert fleet.service.error is None
        disk.is_full = False
        before = fleet.versions[1]
        until(lambda: fleet.versions[1] > before, "commits of this shard")
        fleet.shards[0].restart()
        fleet.until_commits(12)
        end(fleet, *learners)


@pytest.mark.seconds
def test_shard_and_syncer_stay_consistent_if_both_disks_are_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_S", 0.1)
    monkeypatch.setattr(rounds, "RETRY_COMMIT_S", 0.1)
    with Fleet(tmp_path, num_shards=2, run_options=SIX) as fleet:
        shard = fleet.shards[0]

        def fill_the_other() -> None:  # when a commit is on the shard's disk, but not on the syncer's
            others.is_full = others.is_full or bool(shard.service._disk.undecided)

        own, others = FullDisk("append:before", refuses=fill_the_other), FullDisk("append:before")
        fleet.faults = own
        fleet.restart()
        shard.restart(faults=others)
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(12)
        own.is_full = True
        until(lambda: others.num_refused >= 2, "refused writes of the shard")
        own.is_full = others.is_full = False
        fleet.until_commits(12)
        shard.restart()
        fleet.until_commits(12)
        end(fleet, *learners)


@pytest.mark.seconds
def test_a_shard_without_space_for_a_snapshot_still_accepts_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MIN_LOG_BYTES", 0)
    disk = FullDisk("rotate:before")
    disk.is_full = True
    with Fleet(tmp_path, num_shards=2, run_options=SIX) as fleet:
        fleet.shards[0].restart(faults=disk)
        learner = fleet.learner("l0").go()
        until(lambda: disk.num_refused >= 1, "an attempt")
        fleet.until_commits(12)
        fleet.shards[0].restart()
        fleet.until_commits(6)
        end(fleet, learner)


@pytest.mark.seconds
def test_a_new_generation_reaches_a_shard_that_was_away(tmp_path: Path) -> None:
    with Fleet(tmp_path, num_shards=2, run_options=SIX) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(12)
        miss_a_generation(fleet)
        fleet.shards[0].restart()
        until(lambda: fleet.store_of(1).anchor(1).generation == 1, "the generation of the shard")
        before = fleet.versions[1]
        until(lambda: fleet.versions[1] > before, "commits of the shard")
        finish(*learners)
        assert_exact(fleet.stop())
        last = next(learner for learner in learners if learner.is_last)
        assert last.digests() == fleet.digests()


@pytest.mark.seconds
def test_the_log_of_a_shard_stays_short_while_the_disk_of_the_syncer_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_S", 0.05)
    monkeypatch.setattr(rounds, "RETRY_COMMIT_S", 0.05)
    monkeypatch.setattr(snapshots, "MIN_LOG_BYTES", 0)
    disk = FullDisk("append:before")
    with Fleet(tmp_path, num_shards=2, run_options=SIX, faults=disk) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(12)
        shard = fleet.shards[0].service._disk
        disk.is_full = True
        before = shard.log.last_lsn
        until(lambda: shard.log.last_lsn > before + 60, "outer gradients that are withdrawn")
        assert shard.log.nbytes < 2.5 * shard.anchors.nbytes
        disk.is_full = False
        fleet.until_commits(12)
        end(fleet, *learners)


@pytest.mark.seconds
def test_a_shard_whose_disk_hangs_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SHARD_S", 1.0)
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(point: str) -> None:
        if point == "sync:before" and hangs.is_set():
            hangs.clear()
            assert goes_on.wait(60.0)

    with Fleet(tmp_path, num_shards=2, run_options=SIX) as fleet:
        fleet.shards[0].restart(faults=hang)
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(12)
        hangs.set()
        until(lambda: not hangs.is_set(), "a write that hangs")
        before_s = time.monotonic()
        fleet.stop()
        assert time.monotonic() - before_s < 20.0
        goes_on.set()
        fleet.restart()
        fleet.until_commits(12)
        end(fleet, *learners)


def test_a_shard_that_cannot_be_started_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell_token(tmp_path, 1, JoinAddress("127.0.0.1", 1, "run", "token", "0" * 64))
    popen, fails = subprocess.Popen, [False]

    def start(argv: list[str], **options: Any) -> Any:
        if fails[0]:
            fails[0] = False
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return popen(["sleep", "100"], **options)

    monkeypatch.setattr(process, "AGAIN_S", 0.01)
    monkeypatch.setattr(process.subprocess, "Popen", start)
    shard = process.ShardProcess(tmp_path, (1, 2), "127.0.0.1:0", "k")
    shard.start()
    fails[0], first = True, shard._process
    first.kill()
    until(lambda: shard._process is not first and shard._process.poll() is None, "the second attempt")
    shard.stop()
