"""Independent code computes a run's outer gradients, anchors and ledger from the recorded bytes alone."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_diloco.errors import CorruptLogError
from lightning_diloco.manifest import plan_of
from lightning_diloco.protocol.syncer import records
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.syncer.contribution_archive import Recorded, Recorder, read_commit, read_seed
from tests.learner.fleet import OPTIONS, Fleet, finish

BF16_STEP = 2.0**-8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    options = {**OPTIONS, "merge": "rda"}  # includes the mean
    with Fleet(tmp_path_factory.mktemp("run"), record_contributions=True, run_options=options) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(12)
        finish(*learners)
        fleet.stop()
    return fleet


def decoded(payload: torch.Tensor, numel: int) -> np.ndarray:
    """Decode int8 blocks and bfloat16 scales; a scale is the upper half of a float32."""
    data = payload.numpy()
    scales = (data[numel:].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data[:numel].view(np.int8).reshape(len(scales), -1) * scales[:, None].astype(np.float64)


def readies_of(commit: Recorded) -> list[dict[str, int]]:
    """Return the descriptions of the contributions, in the order of the payloads."""
    by_session = {merge["session"]: merge["ready"] for merge in commit.record["merges"]}
    return [by_session[session] for session in commit.sessions]


def shares_of(commit: Recorded) -> np.ndarray:
    """Return the shares of the contributors, in that order."""
    by_session = {merge["session"]: merge["share"] for merge in commit.record["merges"]}
    return np.array([by_session[session] for session in commit.sessions])


def outer_gradient(layout, commit: Recorded) -> np.ndarray:
    """Compute the weighted mean, or RDA for slices that the plan does not merge by the mean."""
    values = np.stack([decoded(payload, layout.padded_numel).ravel() for payload in commit.payloads])
    shares = shares_of(commit)
    assert 0 < shares.sum() <= 1 + 1e-9
    values *= np.minimum(1.0, np.array(commit.max_norms) / np.linalg.norm(values, axis=1))[:, None]
    out = np.zeros(layout.padded_numel)
    for entry in layout.entries:
        part = values[:, entry.offset : entry.offset + entry.numel]
        norms = np.linalg.norm(part, axis=1)
        merged = shares @ part
        if entry.merge == "rda":
            direction = shares @ (part / norms[:, None])  # of any length
            merged = direction / np.linalg.norm(direction) * (shares @ norms)
        out[entry.offset : entry.offset + entry.numel] = merged
    return out


def commits_of(folder: Path, p: int) -> list[Recorded]:
    return [read_commit(path) for path in sorted(folder.glob(f"commit-{p:04d}-*"))]


def test_outer_gradients_in_the_log_come_from_the_recorded_bytes(run: Fleet) -> None:
    plan, config = plan_of(run.service.state.manifest)
    log, num_commits = RedoLog(run.run_dir / "syncer" / "log"), 0
    for record in log.records(log.first_lsn):
        if isinstance(change := records.decode(record.header), records.CommitRecord):
            num_commits += 1
            name = f"commit-{change.fragment:04d}-{change.version:08d}.safetensors"
            commit = read_commit(run.run_dir / "syncer" / "contributions" / name)
            assert records.decode(dict(commit.record)) == change
            logged = torch.frombuffer(bytearray(record.payload), dtype=torch.bfloat16).double().numpy()
            wanted = outer_gradient(plan.layout(change.fragment, config.block_size), commit)
            assert np.abs(logged - wanted).max() <= BF16_STEP * np.abs(wanted).max()
    log.close()
    assert num_commits == run.num_commits > 0


def test_anchors_are_the_seed_and_the_outer_steps_after_it(run: Fleet) -> None:
    plan, config = plan_of(run.service.state.manifest)
    folder, mu = run.run_dir / "syncer" / "contributions", config.outer_momentum
    for p in range(plan.num_fragments):
        layout = plan.layout(p, config.block_size)
        master = read_seed(folder / f"seed-{p:04d}.safetensors").double().numpy()
        momentum, update = np.zeros_like(master), np.zeros_like(master)
        rho, filled = 0.7, 0.0
        for commit in commits_of(folder, p):
            gradient = outer_gradient(layout, commit)
            work = shares_of(commit) @ [ready["steps"] for ready in readies_of(commit)] / config.sync_every
            assert work == pytest.approx(commit.record["work"])
            decay = mu ** min(1.0, work)
            if momentum.any():
                part = np.clip(momentum @ gradient / (momentum @ momentum) * filled / (1 - decay), 0, 1)
                rho += (1 - 0.5 ** min(1.0, work)) * (part / (1 + mu - mu * part) - rho)
            filled = 1 - decay * (1 - filled)
            momentum = decay * momentum + gradient
            update = (1 - mu * max(rho, 0.3)) * (gradient + mu * (1 - decay) / (1 - mu) * momentum)
            master = master - update
        anchor = run.service._store.anchor(p)
        moved = np.abs(master - read_seed(folder / f"seed-{p:04d}.safetensors").numpy()).max()
        assert np.abs(anchor.master.numpy() - master).max() < 0.01 * moved
        assert np.abs(anchor.published.numpy() - master).max() < 0.02 * moved + np.abs(update).max() / 100
        assert anchor.version == len(commits_of(folder, p))
        assert (anchor.correlation.rho, anchor.correlation.filled) == pytest.approx((rho, filled), abs=0.02)


def test_ledger_is_the_sum_of_recorded_ranges(run: Fleet) -> None:
    ranges = defaultdict(list)
    for path in (run.run_dir / "syncer" / "contributions").glob("commit-*"):
        for merge in (record := read_commit(path).record)["merges"]:
            ranges[merge["session"], record["fragment"]].append((merge["ready"]["start"], merge["ready"]["stop"]))
    for spans in ranges.values():
        spans.sort()
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans)), "merged once each"
    merged = sum(stop - start for spans in ranges.values() for start, stop in spans)
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert merged == summary["tokens_merged"] == sum(learner.steps for learner in run.learners) * 7 * 3


@pytest.mark.seconds
def test_one_flipped_byte_at_any_position_is_detected(run: Fleet, tmp_path: Path) -> None:
    path = sorted((run.run_dir / "syncer" / "contributions").glob("commit-*"))[0]
    whole, copy = path.read_bytes(), tmp_path / "commit.safetensors"
    for position in range(0, len(whole), 7):
        copy.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(CorruptLogError, match="the recorded file is damaged"):
            read_commit(copy)
    copy.write_bytes(whole)
    assert read_commit(copy).record["fragment"] == 0


def test_changed_values_with_a_valid_checksum_change_the_outer_gradient(run: Fleet, tmp_path: Path) -> None:
    path = sorted((run.run_dir / "syncer" / "contributions").glob("commit-*"))[0]
    commit = read_commit(path)
    commit.payloads[0][0] ^= 64
    Recorder(tmp_path).keep(commit)
    plan, config = plan_of(run.service.state.manifest)
    layout = plan.layout(0, config.block_size)
    forged = outer_gradient(layout, read_commit(next(tmp_path.iterdir())))
    wanted = outer_gradient(layout, read_commit(path))
    assert np.abs(forged - wanted).max() > BF16_STEP * np.abs(wanted).max()
