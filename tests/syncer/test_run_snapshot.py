"""A snapshot of a run that trains on is complete and consistent; a run begins from it with an exact ledger."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_diloco.errors import ConfigError, StorageError
from lightning_diloco.storage.checkpoint_file import Checkpoint
from lightning_diloco.storage.checkpoint_store import CheckpointStore
from lightning_diloco.syncer import run_snapshot
from lightning_diloco.syncer.run_snapshot import begin_from, take
from lightning_diloco.transport.address import JoinAddress, read_join_file, write_join_file
from tests.learner.fleet import RUN, Fleet, finish


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    run_dir = tmp_path / "run"
    with Fleet(run_dir) as running:
        write_join_file(run_dir / "join", JoinAddress("127.0.0.1", 1, RUN, "token", "0" * 64))
        yield running


@pytest.fixture
def store(fleet: Fleet) -> CheckpointStore:
    return CheckpointStore(str(fleet.run_dir / "checkpoints"))


def answering(store: CheckpointStore, *names: str, step: int = 5) -> Callable[[], list[str]]:
    """Learners that answer a marker when the fleet is queried."""

    def look() -> list[str]:
        if (marker := store.asked()) is not None:
            for name in names:
                store.write(Checkpoint(RUN, name, 1, "p", step, {}, marker))
        return list(names)

    return look


@pytest.mark.slow
def test_a_run_begins_from_a_snapshot_of_a_run_that_continued(
    fleet: Fleet, store: CheckpointStore, tmp_path: Path
) -> None:
    learners = [fleet.learner(name).go() for name in ("a", "b")]
    fleet.until_commits(9)
    before = fleet.versions
    found = take(fleet.run_dir, tmp_path / "kept", store, answering(store, "a", "b"), within_s=5.0)
    fleet.until_commits(9)
    after = fleet.versions
    finish(*learners)
    assert fleet.stop()["ledger_exact"]
    assert all(a <= cut <= c for a, cut, c in zip(before, found.versions, after, strict=True))
    assert found.steps == {"a": 5, "b": 5}
    assert store.asked() is None

    second = tmp_path / "second"
    assert begin_from(tmp_path / "kept", second)["versions"] == list(found.versions)
    copies = CheckpointStore(str(second / "checkpoints"))
    assert [copies.read(entry).step for name in "ab" for entry in copies.entries(name)] == [5, 5]
    assert read_join_file(second / "join").token == "token"
    with Fleet(second) as again:
        assert again.versions == list(found.versions)
        newcomer = again.learner("c").go()
        again.until_commits(6)
        newcomer.enough().done()
        summary = again.stop()
    assert summary["ledger_exact"]
    assert summary["tokens_merged"] > found.tokens_merged
    assert summary["tokens_discarded"].get("lapsed", 0) == found.tokens_pending
    assert summary["tokens_pending"] == 0


def test_the_time_since_the_snapshot_counts_as_paused(fleet: Fleet, store: CheckpointStore, tmp_path: Path) -> None:
    learner, kept = fleet.learner("a").go(), tmp_path / "kept"
    fleet.until_commits(3)
    take(fleet.run_dir, kept, store, answering(store, "a"), within_s=5.0)
    finish(learner)
    fleet.stop()
    age(kept, by_s=900.0)
    begin_from(kept, tmp_path / "second")
    with Fleet(tmp_path / "second") as again:
        newcomer = again.learner("a").go()
        again.until_commits(3)
        finish(newcomer)
        summary = again.stop()
    assert summary["wall_s"] > 900.0
    assert summary["wall_s"] - 60.0 < summary["paused_s"] < summary["wall_s"]
    assert summary["goodput_unpaused"] > 5 * summary["goodput"]


def age(snapshot: Path, *, by_s: float) -> None:
    """Change the times in a snapshot as if it had been taken this number of seconds earlier."""
    about = json.loads((snapshot / "snapshot.json").read_text())
    (snapshot / "snapshot.json").write_text(json.dumps({**about, "taken_s": about["taken_s"] - by_s}))
    tape = snapshot / "tape" / "events.jsonl"
    lines = [json.loads(line) for line in tape.read_text().splitlines()]
    tape.write_text("".join(json.dumps({**line, "t": line["t"] - by_s}) + "\n" for line in lines))


def test_a_learner_that_does_not_answer_is_named_and_no_snapshot_is_written(
    fleet: Fleet, store: CheckpointStore, tmp_path: Path
) -> None:
    learner = fleet.learner("a").go()
    fleet.until_commits(1)
    store.write(Checkpoint(RUN, "mute", 1, "p", 3, {}, "an older marker"))
    with pytest.raises(StorageError, match="no checkpoint of mute came within 0 s"):
        take(fleet.run_dir, tmp_path / "kept", store, lambda: ["mute"], within_s=0.0)
    assert store.asked() is None
    with pytest.raises(ConfigError, match="not a whole snapshot"):
        begin_from(tmp_path / "kept", tmp_path / "second")
    learner.enough().done()


def test_answers_at_the_end_of_the_time_limit_count(fleet: Fleet, store: CheckpointStore, tmp_path: Path) -> None:
    fleet.learner("a").go()
    fleet.until_commits(3)
    found = take(fleet.run_dir, tmp_path / "kept", store, answering(store, "a"), within_s=0.0)
    assert found.steps == {"a": 5}


def test_the_newest_checkpoint_of_a_learner_that_does_not_train_is_used(
    fleet: Fleet, store: CheckpointStore, tmp_path: Path
) -> None:
    fleet.learner("a").go().enough().done()
    store.write(Checkpoint(RUN, "gone", 1, "p", 3, {}))
    found = take(fleet.run_dir, tmp_path / "kept", store, answering(store, "a"), within_s=5.0)
    assert found.steps == {"a": 5, "gone": 3}


def test_files_that_change_during_the_copy_are_copied_again(
    fleet: Fleet, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.learner("a").go().enough().done()
    copy, num_calls = run_snapshot._copy, iter(range(10))

    def unlucky(run_dir: Path, to: Path) -> None:
        copy(run_dir, to)
        if next(num_calls) == 0:  # the log no longer reaches back to this snapshot
            for path in (to / "syncer" / "snapshot").rglob("*.safetensors"):
                path.unlink()

    monkeypatch.setattr(run_snapshot, "_copy", unlucky)
    found = take(fleet.run_dir, tmp_path / "kept", store, lambda: [], within_s=1.0)
    assert found.versions == tuple(fleet.versions)
    assert next(num_calls) == 2


@pytest.mark.parametrize("missing", ["run", "seed"])
def test_a_directory_without_a_run_is_refused(
    fleet: Fleet, store: CheckpointStore, tmp_path: Path, missing: str
) -> None:
    run_dir, match = (tmp_path / "none", "holds no run") if missing == "run" else (fleet.run_dir, "no start values")
    with pytest.raises(ConfigError, match=match):
        take(run_dir, tmp_path / "kept", store, lambda: [], within_s=0.0)


def test_existing_files_are_not_overwritten(fleet: Fleet, store: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not empty"):
        take(fleet.run_dir, fleet.run_dir, store, lambda: [], within_s=0.0)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "snapshot.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="holds join, syncer"):
        begin_from(tmp_path / "kept", fleet.run_dir)
