"""Replay of a run from its files: equal bits without changes, and an error after a change of one byte."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_diloco.cli.main import main
from lightning_diloco.errors import CorruptLogError, StorageError
from lightning_diloco.storage import snapshots
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.syncer.contribution_archive import Recorder, read_commit
from lightning_diloco.syncer.replay import replay
from tests.e2e.recorded import assert_recorded_exactly
from tests.learner.fleet import OPTIONS, Fleet, finish

NUM_COMMITS = 18
# The log shows that a merge differs; if a snapshot follows the commit, the digest on the tape shows it.
OTHER_BITS = "was merged to other bits|has the digest .* as on the tape"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two learners with recorded contributions, a restart and snapshots."""
    run_dir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch, Fleet(run_dir, record_contributions=True) as fleet:
        patch.setattr(snapshots, "MIN_LOG_BYTES", 6000)
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(NUM_COMMITS // 2)
        fleet.restart()
        fleet.until_commits(NUM_COMMITS)
        finish(*learners)
        fleet.stop()
    assert_recorded_exactly(run_dir)
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that a test may damage."""
    return shutil.copytree(trained, tmp_path / "run")


def content(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def the(run_dir: Path, pattern: str) -> Path:
    return sorted(path for path in (run_dir / "syncer").glob(pattern) if path.stat().st_size)[-1]


def test_a_recorded_run_is_replayed_bit_for_bit(run_dir: Path) -> None:
    before = content(run_dir)
    found = replay(run_dir)
    assert found.level == "merges"
    assert found.num_merges == sum(found.versions) >= NUM_COMMITS
    assert 0 < found.num_outer_steps < found.num_merges  # a snapshot was taken in between
    assert found.num_digests == found.num_merges
    assert found.is_summarized
    assert content(run_dir) == before


def test_without_recorded_contributions_the_outer_steps_are_verified(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "syncer" / "contributions")
    found = replay(run_dir)
    assert found.level == "outer steps"
    assert found.num_merges == 0
    assert found.num_digests == found.num_outer_steps > 0


@pytest.mark.seconds
@pytest.mark.parametrize(
    "pattern", ["log/*.log", "contributions/commit-0001-*", "contributions/seed-0002*", "snapshot/*/tensors-*",
                "snapshot/*/state.json", "snapshot/*/B2SUMS"]
)  # fmt: skip
def test_one_flipped_byte_makes_the_replay_fail(run_dir: Path, pattern: str) -> None:
    path = the(run_dir, pattern)
    whole, chance = path.read_bytes(), random.Random(pattern)
    for position in [0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(3))]:
        flip(path, position)
        with pytest.raises(CorruptLogError):
            replay(run_dir)
        path.write_bytes(whole)
    replay(run_dir)


def forge_payload(run_dir: Path) -> None:
    commit = read_commit(the(run_dir, "contributions/commit-*"))
    commit.payloads[0][0] ^= 64
    Recorder(run_dir / "syncer" / "contributions").keep(commit)


def forge_gradient(run_dir: Path) -> None:
    """Write a log with another outer gradient in its last commit and valid checksums."""
    log = RedoLog(run_dir / "syncer" / "log")
    kept = list(log.records(log.first_lsn))
    log.close()
    for path in (run_dir / "syncer" / "log").glob("*.log"):
        path.write_bytes(b"")
    last = max(number for number, record in enumerate(kept) if record.payload)
    forged = RedoLog(run_dir / "syncer" / "log")
    forged.last_lsn = kept[0].lsn - 1
    for number, record in enumerate(kept):
        payload = bytearray(record.payload)
        if number == last:
            payload[1] ^= 1
        forged.append(record.header, payload)
    forged.close()


def forge_summary(run_dir: Path) -> None:
    path = run_dir / "summary.json"
    path.write_text(path.read_text().replace('"tokens_merged": ', '"tokens_merged": 1'))


def lose_commit(run_dir: Path) -> None:
    the(run_dir, "contributions/commit-*").unlink()


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (forge_payload, OTHER_BITS),
        (forge_gradient, "digest|other bits"),
        (forge_summary, "tokens_merged is"),
        (lose_commit, "is missing"),
    ],
)
def test_valid_files_of_another_history_make_the_replay_fail(
    run_dir: Path, forge: Callable[[Path], None], said: str
) -> None:
    forge(run_dir)
    with pytest.raises(CorruptLogError, match=said):
        replay(run_dir)


def test_a_log_that_ends_before_the_tape_makes_the_replay_fail(run_dir: Path) -> None:
    path = the(run_dir, "log/*.log")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptLogError, match=r"the log ends at lsn .* as on the tape"):
        replay(run_dir)


def test_a_run_that_is_being_served_is_refused(run_dir: Path) -> None:
    log = RedoLog(run_dir / "syncer" / "log")
    with pytest.raises(StorageError, match="in use by a syncer"):
        replay(run_dir)
    log.close()


def test_the_command_prints_the_verified_parts(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run_dir)]) == 0
    assert "verified level: merges" in capsys.readouterr().out
    forge_payload(run_dir)
    assert main(["replay", str(run_dir)]) == 1
    assert re.search(OTHER_BITS, capsys.readouterr().err)


def test_a_folder_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 1
    assert "give RUN_DIR" in capsys.readouterr().err


@pytest.mark.seconds
@pytest.mark.parametrize("merge", ["trimmed_mean", "median"])
def test_merges_by_coordinate_are_replayed_bit_for_bit(tmp_path: Path, merge: str) -> None:
    with Fleet(tmp_path, run_options={**OPTIONS, "merge": merge}, record_contributions=True) as fleet:
        learners = [fleet.learner(name).go() for name in "abc"]
        fleet.until_commits(9)
        finish(*learners)
        fleet.stop()
    replayed = replay(tmp_path)
    assert (replayed.level, replayed.num_merges) == ("merges", sum(replayed.versions))
