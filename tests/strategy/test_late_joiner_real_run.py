"""A process that joins a real run late, with a syncer and a first learner of their own: where its schedule begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.runtime.tape import read_tape
from tests.strategy.conftest import TinyModel

SYNC_EVERY, MAX_STEPS, OWN_STEPS = 4, 100_000, 3
ROOT = Path(__file__).parents[2]

LATE = f"""
import json, lightning as L, torch
from tests.strategy.test_strategy_schedules import Scheduled

class Brief(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= {OWN_STEPS}

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
torch.manual_seed(7)  # frozen parameters are those of the run
model = Scheduled()
trainer = L.Trainer(accelerator="cpu", devices=1, max_steps={MAX_STEPS}, limit_val_batches=0, callbacks=Brief(),
                    strategy="decoupled_diloco", **quiet)
trainer.fit(model)
print("rates", json.dumps(model.rates))
"""


def tape(root: Path) -> list[dict[str, Any]]:
    (path,) = root.glob("diloco/*/tape/events.jsonl")
    return list(read_tape(path))


class Visited(Callback):
    """Once every fragment has two versions, somebody else visits the run, while training here stands still."""

    def __init__(self, root: Path) -> None:
        self.root, self.said = root, ""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        versions = {line["fragment"]: line["version"] for line in tape(self.root) if line["event"] == "commit"}
        if len(versions) == 2 and min(versions.values()) >= 2:
            (join,) = self.root.glob("diloco/*/join")
            home = self.root / "visitor"
            home.mkdir()
            environment = {**os.environ, "DILOCO_JOIN": join.read_text().strip(), "PYTHONPATH": str(ROOT)}
            argv = [sys.executable, "-W", "ignore", "-c", LATE]
            done = subprocess.run(argv, cwd=home, env=environment, capture_output=True, text=True, check=False)
            self.said = done.stdout + done.stderr
            trainer.should_stop = True


@pytest.mark.slow
def test_schedule_of_a_late_joiner_begins_at_the_runs_position(
    tmp_path: Path, model: TinyModel, trainer_for: Callable[..., L.Trainer]
) -> None:
    visited = Visited(tmp_path)
    strategy = DecoupledDiLoCoStrategy(sync_every=SYNC_EVERY, num_fragments=2, overlap=1)
    trainer_for(strategy=strategy, max_steps=MAX_STEPS, limit_val_batches=0, callbacks=visited).fit(model)
    (said,) = [line for line in visited.said.splitlines() if line.startswith("rates ")] or [visited.said]
    assert said.startswith("rates "), said
    rates = json.loads(said.removeprefix("rates "))
    lines = tape(tmp_path)
    last_join = max(k for k, line in enumerate(lines) if line["event"] == "join")
    furthest = max(line["version"] for line in lines[:last_join] if line["event"] == "commit")
    assert furthest >= 2
    assert rates == pytest.approx([SYNC_EVERY * furthest + k for k in range(OWN_STEPS)])
    assert f"schedules by steps begin at step {SYNC_EVERY * furthest}" in visited.said
