"""The restore of a restarted syncer: its files, its speed, and its answers meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from lightning_diloco.errors import CorruptLogError, JoinError, RestoringError
from lightning_diloco.learner import join as joining
from lightning_diloco.process import parallel
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.syncer import process as syncer
from lightning_diloco.syncer.gated_handler import GatedHandler
from lightning_diloco.syncer.replay import replay
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.address import JoinAddress, read_join_file, write_join_file
from lightning_diloco.transport.flight import FlightConnection
from tests.learner.fleet import Fleet, assert_exact, finish, until


def trained(fleet: Fleet, commits: int = 6) -> None:
    learners = [fleet.learner(name).go() for name in ("l0", "l1")]
    fleet.until_commits(commits)
    finish(*learners)


@pytest.mark.seconds
def test_a_clean_stop_leaves_a_snapshot_and_no_log_to_replay(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        trained(fleet)
        published, totals = fleet.published(), fleet.service.state.ledger.totals()
        fleet.stop()
        told: list[str] = []
        durable = SyncerStore(tmp_path, tell=told.append)
        state = SyncerState(run="any")
        store = durable.restore(state, time.monotonic())
        durable.close()
        assert store is not None
        assert not any("replaying the log" in text for text in told)
        assert [torch.equal(store.anchor(p).published, values) for p, values in enumerate(published)] == [True] * 3
        assert state.ledger.totals() == totals
        snapshots = list((tmp_path / "syncer" / "snapshot").iterdir())
        assert len(snapshots) == 2, "the log can still be computed again from the older one"
        assert replay(tmp_path).num_outer_steps >= 6
        fleet.restart(cleanly=True)
        fleet.stop()  # without new records
        assert list((tmp_path / "syncer" / "snapshot").iterdir()) == snapshots
        fleet.restart(cleanly=True)
        trained(fleet)
        assert_exact(fleet.stop())
        assert len(list((tmp_path / "syncer" / "snapshot").iterdir())) == 2
        assert replay(tmp_path).num_outer_steps >= 12


@pytest.mark.seconds
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_replay_by_several_threads_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(parallel, "cores_here", lambda: num_threads)
    with Fleet(tmp_path) as fleet:
        trained(fleet, 12)
        wanted = [fleet.service._store.anchor(p).tensors() for p in range(3)]
        fleet.crash()
        told: list[str] = []
        durable = SyncerStore(tmp_path, tell=told.append)
        store = durable.restore(SyncerState(run="any"), time.monotonic())
        durable.close()
        assert store is not None
        for p, tensors in enumerate(wanted):
            found = store.anchor(p).tensors()
            assert [torch.equal(found[name], tensor) for name, tensor in tensors.items()] == [True] * 5
        replayed = [text for text in told if "replaying the log" in text]
        assert len(replayed) > 12
        assert replayed[-1].split("record ")[1] == "{0} of {0}".format(replayed[-1].split(" of ")[1])
        fleet.restart()


@pytest.mark.seconds
def test_joiners_wait_for_a_restore_while_it_makes_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "REACH_S", 0.05)
    monkeypatch.setattr(joining, "RESTORING_S", 2.0)
    monkeypatch.setattr(joining, "AGAIN_S", 0.02)
    with Fleet(tmp_path) as fleet:
        door = GatedHandler()
        fleet.transport.handler = door
        learner = fleet.learner("l0")
        asked: list[int] = []
        learner.wire.before["send"] = lambda: asked.append(len(asked))
        joined = learner.aside(learner.join)  # type: ignore[arg-type]
        for record in range(4):
            door.tell(f"replaying the log, record {record} of 4")
            before = len(asked)
            until(lambda before=before: len(asked) > before + 5, "its asking again")  # longer than REACH_S in total
        assert not joined.done()
        door.open(fleet.service)
        joined.result(timeout=10.0)
        learner.finish()


def test_joiners_give_up_on_a_restore_without_progress_and_report_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "RESTORING_S", 0.2)
    monkeypatch.setattr(joining, "AGAIN_S", 0.02)
    door = GatedHandler()
    door.tell("replaying the log, record 7 of 9")
    with Fleet(tmp_path) as fleet:
        fleet.transport.handler = door
        with pytest.raises(JoinError, match="record 7 of 9"):
            fleet.learner("l0").join()
        fleet.transport.handler = fleet.service


def test_a_restarted_syncer_answers_while_it_reads_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Fleet(tmp_path) as fleet:
        trained(fleet, 3)
        fleet.crash()
    write_join_file(tmp_path / "join", JoinAddress("127.0.0.1", 1, "toy", "token", "0" * 64))
    answers: list[str] = []

    def restored(self: SyncerStore, *_: object) -> None:
        connection = FlightConnection(read_join_file(tmp_path / "join"))
        with pytest.raises(RestoringError) as refused:
            connection.status()
        connection.close()
        answers.append(str(refused.value))
        self.close()
        raise CorruptLogError("enough")

    monkeypatch.setattr(SyncerStore, "restore", restored)
    with pytest.raises(CorruptLogError, match="enough"):
        syncer.serve(syncer.SyncerOptions(run_dir=tmp_path))
    assert "the syncer restores its run (checking the log, record" in answers[0]
