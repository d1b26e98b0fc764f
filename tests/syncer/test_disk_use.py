"""Log and snapshots of a run together stay under three times the size of its state, also while one replaces another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.manifest import ModelDescription, make_manifest
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.storage import snapshots
from lightning_diloco.syncer.store import SyncerStore, seeded_store

SHAPES = {"embedding": (256, 64), "hidden": (256, 128), "bias": (128,)}
NUM_FRAGMENTS, NUM_COMMITS = 4, 80


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.seconds
def test_log_and_snapshots_stay_under_three_times_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MIN_LOG_BYTES", 0)  # the log of a small model may be larger
    options = {"sync_every": 4, "num_fragments": NUM_FRAGMENTS, "overlap": 1}
    manifest, plan = make_manifest(ModelDescription(SHAPES, frozenset({"embedding"}), {}, "tokens"), options)
    numels = [plan.layout(p, manifest["config"]["block_size"]).padded_numel for p in range(NUM_FRAGMENTS)]
    store = seeded_store(manifest, {p: torch.randn(numel) for p, numel in enumerate(numels)})
    machine, disk, sizes = codec.dump(SyncerState(run="r").saved()), tmp_path / "syncer", list[int]()
    durable = SyncerStore(tmp_path, faults=lambda point: sizes.append(nbytes(disk)))
    durable.store_seed(machine, manifest, store)
    for k in range(NUM_COMMITS):
        p, version = k % NUM_FRAGMENTS, 1 + k // NUM_FRAGMENTS
        gradient = torch.randn(numels[p]).bfloat16()
        record = records.CommitRecord(
            fragment=p, generation=0, version=version, round=k, work=0.5, num_stepping=1, merges=()
        )
        durable.write(records.encode(record), bytes_of(gradient))
        store.commit(p, gradient, work=0.5, version=version)
        if durable.is_snapshot_due(store):
            durable.begin_snapshot(machine, manifest, store)
            durable.snapshots.wait()
    durable.close()
    assert durable.log.first_lsn > NUM_COMMITS // 2, "the log was cut, and grew again"
    state_bytes = nbytes(disk / "snapshot")
    assert state_bytes >= 12 * sum(numels)
    assert 2 * state_bytes < max(sizes) < 3 * state_bytes
