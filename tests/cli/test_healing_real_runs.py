"""Real learners are killed and preempted: they restart with the recorded state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.storage.tape import read_tape
from tests import command
from tests.e2e.recorded import assert_recorded_exactly

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

CONTRIBUTES_WITHIN_S = 30.0
# `own`: killed. `bare`: its checkpoints are removed, then it is killed. `torn`: its newest is cut short, then killed.
# `asked`: SIGTERM. Each once, at the first step after its second checkpoint; a note of every step's moments is kept.
SCRIPT = """
import time
BEGAN = time.time()
import hashlib, json, os, shutil, signal, sys
from pathlib import Path
import lightning as L
import torch
import lightning_diloco

run_dir, name = Path(os.environ["DILOCO_RUN_DIR"]), os.environ["DILOCO_LEARNER"]
what = dict(l0="own", l1="bare", l2="torn", l3="asked")[name]

def digest(optimizer):
    state = optimizer.state_dict()["state"]
    parts = [t for index in sorted(state) for _, t in sorted(state[index].items())]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in parts)).hexdigest()

class Note(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        with (run_dir / f"{name}.jsonl").open("a") as notes:
            row = dict(pid=os.getpid(), began=BEGAN, step=trainer.global_step, digest=digest(trainer.optimizers[0]))
            print(json.dumps(row), file=notes)
        own, marker = run_dir / "checkpoints" / name, run_dir / f"{name}.struck"
        found = sorted(own.glob("*.safetensors"))
        if marker.exists() or len(found) < 2:
            return
        if what == "bare" and not list((run_dir / "checkpoints" / "l0").glob("*.safetensors")):
            return
        trainer.strategy._present.checkpointer.wait(10)
        marker.touch()
        if what == "bare":
            shutil.rmtree(own)
        if what == "torn":
            newest = sorted(own.glob("*.safetensors"))[-1]
            newest.write_bytes(newest.read_bytes()[:-64])
        os.kill(os.getpid(), signal.SIGTERM if what == "asked" else signal.SIGKILL)

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

L.seed_everything(1)
data = torch.utils.data.DataLoader(torch.randn(4096, 8), batch_size=4, shuffle=True)
trainer = L.Trainer(
    strategy=lightning_diloco.DecoupledDiLoCoStrategy(sync_every=8, num_fragments=2, checkpoint_every=25),
    accelerator="cpu", devices=1, max_steps=MAX_STEPS, enable_progress_bar=False, enable_model_summary=False,
    logger=False, enable_checkpointing=False, callbacks=Note(),
)
trainer.fit(Model(), data)
"""
MAX_STEPS = 300


@dataclass(frozen=True)
class Run:
    """A finished run: its output, and the notes of each process of a learner."""

    folder: Path
    exit_code: int
    said: str

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def lives(self, learner: str) -> list[dict[int, dict[str, Any]]]:
        """Return the notes of each process, by step."""
        lives: dict[int, dict[int, dict[str, Any]]] = {}
        for line in (self.folder / f"{learner}.jsonl").read_text().splitlines():
            note = json.loads(line)
            lives.setdefault(note["pid"], {})[note["step"]] = note
        return list(lives.values())

    def log(self, learner: str) -> str:
        return (self.folder / "learners" / learner / "log.txt").read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("healing")
    (folder / "train.py").write_text(SCRIPT.replace("MAX_STEPS", str(MAX_STEPS)))
    ended = command.run(folder, "run", "train.py", "--local", 4, "--run-dir", "run", "--no-table")
    return Run(folder / "run", ended.returncode, ended.stdout + ended.stderr)


def test_the_run_ends_by_itself_and_its_ledger_is_exact(run: Run) -> None:
    assert run.exit_code == 0, run.said
    summary = run.summary
    assert summary["status"] == "finished"
    assert summary["ledger_exact"]
    assert summary["joins"] == 8
    assert_recorded_exactly(run.folder)
    assert "undrained" not in summary["tokens_discarded"], "who was asked to go had sent everything"
    assert all(max(run.lives(f"l{k}")[-1]) == MAX_STEPS - 1 for k in range(4)), "each trained as far as it was told"


def test_a_killed_learner_restarts_with_its_own_moments(run: Run) -> None:
    assert "l0 died (signal SIGKILL); restart 1 of 3" in run.said
    first, second = run.lives("l0")
    began_at = min(second)
    assert began_at >= 25
    assert second[began_at]["digest"] == first[began_at]["digest"]
    assert second[began_at]["digest"] != first[0]["digest"], "there is something to restore"


def test_a_learner_without_checkpoints_uses_a_peers(run: Run) -> None:
    first, second = run.lives("l1")
    began_at, peers = min(second), [life for k in (0, 2, 3) for life in run.lives(f"l{k}")]
    assert "goes on from peer l" in run.log("l1")
    assert second[began_at]["digest"] in {life[began_at]["digest"] for life in peers if began_at in life}
    assert began_at not in first or second[began_at]["digest"] != first[began_at]["digest"]


def test_a_torn_checkpoint_is_skipped_with_a_warning(run: Run) -> None:
    first, second = run.lives("l2")
    began_at = min(second)
    assert "it is not used" in run.log("l2")
    assert began_at <= max(first) - 25
    assert second[began_at]["digest"] == first[began_at]["digest"]


def test_a_preempted_learner_leaves_cleanly_and_loses_no_step(run: Run) -> None:
    assert "l3 was preempted (SIGTERM) and left; it is restarted" in run.said
    leaves = [line for line in read_tape(run.folder / "tape" / "events.jsonl") if line["event"] == "leave"]
    assert [line["reason"] for line in leaves if line["learner"] == "l3"] == ["preempted", "finished"]
    first, second = run.lives("l3")
    assert min(second) == max(first) + 1


def test_each_contributes_again_soon_after_its_process_began(run: Run) -> None:
    tape = list(read_tape(run.folder / "tape" / "events.jsonl"))
    for name in ("l0", "l1", "l2", "l3"):
        began_s = [next(iter(life.values()))["began"] for life in run.lives(name)]
        joined_s = [line["t"] for line in tape if line["event"] == "join" and line["learner"] == name]
        merged_s = [line["t"] for line in tape if line["event"] == "commit" and name in line["learners"]]
        # A commit before the join may name what the process before it had sent.
        first_s, second_s = (
            next(t for t in merged_s if t > joined) - began for began, joined in zip(began_s, joined_s, strict=True)
        )
        # Nearly all of it are imports: where a machine is too busy for any start within the bound, starts are compared.
        assert second_s < max(CONTRIBUTES_WITHIN_S, 1.5 * first_s), f"{name}: {second_s:.1f} s, first {first_s:.1f} s"
