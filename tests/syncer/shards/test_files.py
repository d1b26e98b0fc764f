"""Operations on the files of a run with shards: replay, snapshot, and a new number of shards."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.errors import ConfigError, CorruptLogError, StorageError
from lightning_diloco.storage import snapshots
from lightning_diloco.storage.checkpoint_store import CheckpointStore
from lightning_diloco.syncer import replacement, run_snapshot
from lightning_diloco.syncer.replay import replay
from lightning_diloco.syncer.run_snapshot import begin_from, take
from lightning_diloco.syncer.shards.layout import directory_of, num_shards_of
from lightning_diloco.syncer.shards.resharding import settle_num_shards
from lightning_diloco.syncer.shards.whole import read_run
from lightning_diloco.transport.address import JoinAddress, write_join_file
from tests.e2e.recorded import assert_recorded_exactly
from tests.learner.fleet import RUN, Fleet, assert_exact, finish, until
from tests.syncer.shards.test_shards import SIX, miss_a_generation
from tests.syncer.test_replay import content, flip

NUM_SHARDS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a stopped run of two learners with recorded contributions, restarts and snapshots."""
    run_dir = tmp_path_factory.mktemp("run")
    options = {"num_shards": NUM_SHARDS, "run_options": SIX, "record_contributions": True}
    with pytest.MonkeyPatch.context() as patch, Fleet(run_dir, **options) as fleet:
        patch.setattr(snapshots, "MIN_LOG_BYTES", 3000)
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(12)
        fleet.shards[0].restart()
        fleet.until_commits(6)
        patch.undo()  # later commits stay in the logs
        fleet.restart()
        fleet.until_commits(24)
        finish(*learners)
        fleet.stop()
    assert_recorded_exactly(run_dir)
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that a test may change."""
    return shutil.copytree(trained, tmp_path / "run")


def digests(run_dir: Path) -> tuple[str, ...]:
    _, store = read_run(run_dir)
    assert store is not None
    return store.digests()


# --------------------------------------------------------------------------------------------------------------- replay


def test_a_recorded_run_is_merged_again_bit_for_bit(run_dir: Path) -> None:
    before = content(run_dir)
    found = replay(run_dir)
    assert found.level == "merges"
    assert found.num_merges == sum(found.versions) >= 42
    assert found.num_digests == found.num_merges
    assert found.is_summarized
    assert content(run_dir) == before


def test_the_outer_steps_of_all_shards_are_computed_again(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "syncer" / "contributions")
    found = replay(run_dir)
    assert found.level == "outer steps"
    assert found.num_digests == found.num_outer_steps > 6
    assert found.is_summarized


@pytest.mark.parametrize("pattern", ["1/log/*.log", "2/snapshot/*/tensors-*", "2/snapshot/*/state.json"])
def test_a_flipped_byte_in_the_files_of_a_shard_makes_the_replay_fail(run_dir: Path, pattern: str) -> None:
    # The last record of a log may be damaged without effect, because it is the withdrawal of an undecided version.
    path = max((run_dir / "syncer" / "shards").glob(pattern), key=lambda path: path.stat().st_size)
    for position in (0, path.stat().st_size // 2):
        flip(path, position)
        with pytest.raises(CorruptLogError):
            replay(run_dir)
        flip(path, position)
    replay(run_dir)


def test_a_shard_whose_files_are_elsewhere_is_named(run_dir: Path) -> None:
    shutil.rmtree(directory_of(run_dir, 2))
    with pytest.raises(StorageError, match=r"shards/2"):
        replay(run_dir)
    with pytest.raises(StorageError, match=r"no values of shard 2; .* copy them from its machine"):
        settle_num_shards(run_dir, 2)


# ------------------------------------------------------------------------------------------------------------- snapshot


@pytest.mark.seconds
def test_a_snapshot_is_cut_at_the_versions_of_the_syncer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with Fleet(first, num_shards=NUM_SHARDS, run_options=SIX) as fleet:
        write_join_file(first / "join", JoinAddress("127.0.0.1", 1, RUN, "token", "0" * 64))
        learners = [fleet.learner(name).go() for name in ("a", "b")]
        fleet.until_commits(12)
        copytree = shutil.copytree

        def after_more_commits(source: Path, *args: Any, **options: Any) -> Path:
            if source == directory_of(first, 1) / "snapshot":
                fleet.until_commits(12)
            return copytree(source, *args, **options)

        monkeypatch.setattr(run_snapshot.shutil, "copytree", after_more_commits)
        store = CheckpointStore(str(first / "checkpoints"))
        found = take(first, tmp_path / "kept", store, lambda: [], within_s=0.0)
        monkeypatch.undo()
        assert all(cut < now for cut, now in zip(found.versions, fleet.versions, strict=True))
        finish(*learners)
        assert_exact(fleet.stop())

    begin_from(tmp_path / "kept", second)
    assert num_shards_of(second) == NUM_SHARDS
    with Fleet(second, num_shards=NUM_SHARDS) as again:
        assert again.versions == list(found.versions)
        newcomer = again.learner("c").go()
        again.until_commits(12)
        finish(newcomer)
        summary = again.stop()
    assert_exact(summary)
    assert summary["tokens_discarded"].get("lapsed", 0) == found.tokens_pending


# --------------------------------------------------------------------------------------------- another number of shards


@pytest.mark.seconds
@pytest.mark.parametrize("num_shards", [1, 2, 4, 6])
def test_a_run_goes_on_with_another_number_of_shards(run_dir: Path, num_shards: int) -> None:
    state, before = read_run(run_dir)[0], digests(run_dir)
    assert settle_num_shards(run_dir, num_shards) == num_shards
    assert settle_num_shards(run_dir, None) == num_shards
    assert digests(run_dir) == before
    assert read_run(run_dir)[0].ledger.totals() == state.ledger.totals()
    with Fleet(run_dir, num_shards=num_shards, record_contributions=True) as fleet:
        assert fleet.digests() == [*before]
        learners = [fleet.learner(name).go() for name in ("l2", "l3")]
        fleet.until_commits(12)
        finish(*learners)
        assert_exact(fleet.stop())
    found = replay(run_dir)
    assert found.level == "merges"
    assert found.num_merges == sum(found.versions)


@pytest.mark.parametrize("num_removals", range(5))
def test_a_crash_during_the_change_loses_nothing(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, num_removals: int
) -> None:
    before, removals, remove = digests(run_dir), iter(range(num_removals)), replacement.remove_tree

    def crash(path: Path) -> None:
        if next(removals, None) is None:
            raise KeyboardInterrupt
        remove(path)

    with monkeypatch.context() as crashing:
        crashing.setattr(replacement, "remove_tree", crash)
        with pytest.raises(KeyboardInterrupt):
            settle_num_shards(run_dir, 2)
    replacement.install(run_dir)
    assert num_shards_of(run_dir) == (NUM_SHARDS if num_removals == 0 else 2)
    assert digests(run_dir) == before
    assert not (run_dir / "copy").exists()


@pytest.mark.seconds
def test_a_run_without_start_values_may_change_its_number_of_shards(tmp_path: Path) -> None:
    with Fleet(tmp_path, num_shards=2) as fleet:
        fleet.stop()
    with Fleet(tmp_path, num_shards=3) as fleet:
        learner = fleet.learner("l0").go()
        fleet.until_commits(6)
        finish(learner)
        assert_exact(fleet.stop())


@pytest.mark.seconds
def test_reasons_against_another_number_of_shards_are_named(run_dir: Path) -> None:
    before = content(run_dir)
    with pytest.raises(ConfigError, match="has 6 fragments; each shard needs one"):
        settle_num_shards(run_dir, 7)
    (run_dir / "syncer" / "standby.json").touch()
    with pytest.raises(ConfigError, match="has a standby with 3; end the standby"):
        settle_num_shards(run_dir, 2)
    (run_dir / "syncer" / "standby.json").unlink()
    assert content(run_dir) == before
    with Fleet(run_dir, num_shards=NUM_SHARDS), pytest.raises(StorageError, match="in use by a syncer"):
        settle_num_shards(run_dir, 2)


@pytest.mark.seconds
def test_a_shard_that_was_away_at_a_new_generation_is_resharded_in_that_generation(tmp_path: Path) -> None:
    with Fleet(tmp_path, num_shards=2, run_options=SIX) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(12)
        miss_a_generation(fleet)
        for learner in learners:
            learner.wire.is_cut = True
        fleet.crash()
    with Fleet(tmp_path, num_shards=1, run_options=SIX) as fleet:
        assert [fleet.service._store.anchor(p).generation for p in range(6)] == [1] * 6
        learners = [fleet.learner(name).go() for name in ("l2", "l3")]
        before = fleet.versions
        until(lambda: all(b > a for a, b in zip(before, fleet.versions, strict=True)), "commits of all fragments")
        finish(*learners)


@pytest.mark.seconds
def test_a_copy_of_a_shard_finds_no_records_from_before_a_resharding(tmp_path: Path) -> None:
    """A standby that was away follows the shards again after their number was changed twice."""

    def train(num_shards: int) -> tuple[int, int]:
        with Fleet(tmp_path, num_shards=num_shards, run_options=SIX) as fleet:
            learner = fleet.learner("l0").go()
            fleet.until_commits(12)
            finish(learner)
            fleet.stop()
            log = fleet.shards[0].service._disk.log
            return log.first_lsn, log.last_lsn

    copied = train(2)[1]
    train(3)
    assert train(2)[0] > copied
