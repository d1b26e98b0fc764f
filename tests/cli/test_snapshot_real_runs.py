"""`diloco snapshot` of a run that trains, and `diloco run --from`: syncer and learners continue from the snapshot."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.cli.main import main
from lightning_diloco.syncer.replay import replay
from lightning_diloco.transport.address import read_join_file
from tests import command
from tests.cli.line_model import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

WITHIN_S = 120.0
# Trains until a file appears, and records the moments and the position of every step.
SCRIPT = (
    """
import hashlib, json, os, time
from pathlib import Path
import lightning as L
import torch
import lightning_diloco

run_dir, name = Path(os.environ["DILOCO_RUN_DIR"]), os.environ["DILOCO_LEARNER"]

class Note(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        state = trainer.optimizers[0].state_dict()["state"]
        moments = b"".join(t.numpy().tobytes() for k in sorted(state) for _, t in sorted(state[k].items()))
        row = dict(step=trainer.global_step, digest=hashlib.sha256(moments).hexdigest(), first=batch[0, 0].item())
        with (run_dir / f"{name}.jsonl").open("a") as notes:
            print(json.dumps(row), file=notes)
        trainer.should_stop = (run_dir / "enough").exists()
"""
    + MODEL
    + """
L.seed_everything(1)
# A larger loader would be leased, and then the syncer's lease table determines the position.
data = torch.utils.data.DataLoader(torch.randn(4000, 8), batch_size=4, shuffle=True)
trainer = L.Trainer(
    strategy=lightning_diloco.DecoupledDiLoCoStrategy(sync_every=8, num_fragments=2, checkpoint_every=1000),
    accelerator="cpu", devices=1, max_steps=5000, enable_progress_bar=False, enable_model_summary=False,
    logger=False, enable_checkpointing=False, callbacks=Note(),
)
trainer.fit(Model(), data)
"""
)


class Running:
    """One `diloco run` of the script with two learners."""

    def __init__(self, script: Path, run_dir: Path, *words: str) -> None:
        self.dir = run_dir
        own = ("--local", 2, "--run-dir", run_dir, "--no-table")
        self._process = command.start(script.parent, "run", script, *own, *words)

    def until_steps(self, num_steps: int) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        while any(len(self.notes(name)) < num_steps for name in ("l0", "l1")):
            assert time.monotonic() < deadline_s, "the learners do not train"
            assert self._process.poll() is None, self._process.communicate()[0]
            time.sleep(0.1)

    def notes(self, name: str) -> list[dict[str, Any]]:
        path = self.dir / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def end(self) -> dict[str, Any]:
        (self.dir / "enough").touch()
        said, _ = self._process.communicate(timeout=WITHIN_S)
        assert self._process.returncode == 0, said
        return json.loads((self.dir / "summary.json").read_text())

    def kill(self) -> None:
        self._process.kill()  # its children are on a leash
        self._process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "train.py").write_text(SCRIPT)
    started: list[Running] = []

    def run(name: str, *words: str) -> Running:
        started.append(Running(tmp_path / "train.py", tmp_path / name, *words))
        return started[-1]

    yield run
    for running in started:
        running.kill()


def test_a_run_continues_from_a_snapshot_taken_while_it_trained(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, kept = start("first"), tmp_path / "kept"
    first.until_steps(40)
    assert main(["snapshot", str(first.dir), "--to", str(kept)]) == 0
    said = capsys.readouterr().out
    assert "exact" in said
    assert "discards them" in said
    about = json.loads((kept / "snapshot.json").read_text())
    assert set(about["steps"]) == {"l0", "l1"}
    first.until_steps(max(about["steps"].values()) + 10)
    original = first.end()
    assert original["ledger_exact"], "taking a snapshot changes nothing in the run"

    second = start("second", "--from", str(kept))
    second.until_steps(30)
    summary = second.end()
    assert (summary["status"], summary["ledger_exact"]) == ("finished", True)
    assert summary["run"] == original["run"] == about["run"]
    assert read_join_file(second.dir / "join").port != read_join_file(first.dir / "join").port
    assert summary["joins"] == 4
    assert summary["tokens_merged"] > about["tokens_merged"] > 0
    assert summary["tokens_discarded"] == ({"lapsed": about["tokens_pending"]} if about["tokens_pending"] else {})
    for name, step in about["steps"].items():
        was, now = next(note for note in first.notes(name) if note["step"] == step), second.notes(name)[0]
        assert now == was, "step, moments and data"
    assert replay(second.dir).level == "outer steps"
