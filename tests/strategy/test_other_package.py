"""Code with `import pytorch_lightning as pl`, whose classes differ from those of `lightning`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_diloco import pytorch_lightning as other
from tests.strategy.test_strategy_registration import python
from tests.test_layers import SOURCES, imported

SCRIPT = """
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_diloco
from lightning_diloco.tracking import Wandb


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        loss = (self.line(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", (self.line(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    x = torch.randn(256, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)
    assert issubclass(Wandb, pl.Callback)
    for strategy in ("decoupled_diloco", lightning_diloco.DecoupledDiLoCoStrategy(sync_every=8)):
        model, stop = Line(), pl.callbacks.EarlyStopping("val_loss", patience=99)
        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=80, callbacks=[stop])
        trainer.fit(model, loader, loader)
        assert isinstance(trainer.strategy, lightning_diloco.DecoupledDiLoCoStrategy)
        print(f"off by {(model.line.weight - 1).abs().max().item():.1e}")
    trainer.validate(ckpt_path=trainer.checkpoint_callback.best_model_path or None, dataloaders=loader, model=model)
"""


@pytest.mark.parametrize("where", [where for where in SOURCES if where.startswith(("strategy/", "tracking/"))])
def test_a_module_that_is_compiled_again_does_not_name_lightning(where: str) -> None:
    text = other.renamed(SOURCES[where])
    assert "lightning" not in [name.partition(".")[0] for name in imported(ast.parse(text))]
    assert "lightning_diloco.strategy" not in text


@pytest.mark.parametrize(
    ("imports", "package"),
    [
        ("lightning.pytorch", "lightning_diloco"),
        ("pytorch_lightning", "lightning_diloco.pytorch_lightning"),
        ("lightning.pytorch, pytorch_lightning", "lightning_diloco"),
    ],
)
def test_the_package_that_is_imported_decides(tmp_path: Path, imports: str, package: str) -> None:
    for name in ("lightning", "lightning/pytorch", "pytorch_lightning"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    code = f"import {imports}; from lightning_diloco.pytorch_lightning import package; print(package())"
    assert python(code, tmp_path) == package


def test_modules_that_are_not_compiled_again_are_not_found() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Strategy'"):
        _ = other.Strategy
    with pytest.raises(ModuleNotFoundError, match=r"lightning_diloco\.pytorch_lightning\.hf"):
        __import__("lightning_diloco.pytorch_lightning.hf")


@pytest.mark.slow
def test_a_script_trains_with_the_other_package(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    path = f"import sys; sys.path[:0] = {sys.path!r}; import runpy; runpy.run_path('script.py', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", path], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    errors = [float(line.partition("off by ")[2]) for line in ended.stdout.splitlines() if "off by " in line]
    assert len(errors) == 2
    assert max(errors) < 0.5
