"""`diloco run SCRIPT --wandb`: the script's own WandbLogger, offline, in the group of the syncer's run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_diloco.tracking.script import environment
from tests import command
from tests.tracking.offline import read

SCRIPT = """
import lightning as L, torch, wandb
import lightning_diloco
from lightning.pytorch.loggers import WandbLogger
from tests.strategy.conftest import TinyModel

class UntilNewsCame(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = "fleet_tokens" in trainer.logged_metrics

opened, real = [], wandb.init
wandb.init = lambda **options: opened.append(real(**options)) or opened[-1]
torch.manual_seed(7)
trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=100_000, limit_val_batches=0, log_every_n_steps=1,
                    strategy="decoupled_diloco", logger=WandbLogger(PROJECT), enable_checkpointing=False,
                    callbacks=UntilNewsCame())
trainer.fit(TinyModel())
assert len(opened) == 1
"""


@pytest.mark.slow
@pytest.mark.parametrize(("named", "project"), [("", "mine"), ("project='theirs'", "theirs")])
def test_a_script_s_own_logger_joins_the_group(tmp_path: Path, named: str, project: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("PROJECT", named))
    words = ("run", "train.py", "--local", 2, "--run-dir", "run", "--wandb", "mine", "--no-page")
    printed = command.succeed(tmp_path, *words, PYTHONWARNINGS="ignore")
    assert "the script's own WandbLogger logs its learners to this group" in printed
    syncer, *learners = sorted(read(tmp_path), key=lambda run: (run.job_type != "syncer", run.name))
    assert (syncer.id, syncer.project) == (f"{syncer.group}-syncer", "mine")
    assert [run.name for run in learners] == ["l0", "l1"]
    for run in learners:
        assert (run.id, run.group, run.project) == (f"{syncer.group}-{run.name}", syncer.group, project)
        assert {"train_loss", "fleet_tokens", "diloco/staleness_versions"} <= run.keys


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, "0" * 40])
def test_a_script_is_offline_only_without_a_login(monkeypatch: pytest.MonkeyPatch, key: str | None) -> None:
    from lightning_diloco.tracking import script

    script._is_logged_out.cache_clear()
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    told = environment("mine", "run-1", "l0")
    assert (told["WANDB_RUN_ID"], told["WANDB_RUN_GROUP"], told["WANDB_RESUME"]) == ("run-1-l0", "run-1", "allow")
    assert told.get("WANDB_MODE") == (None if key else "offline")
