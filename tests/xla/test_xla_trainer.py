"""A Trainer on one XLA device, with a real syncer process."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_xla.debug import metrics

from lightning_diloco.devices.xla import ops as xla
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.backends.xla import SingleDeviceXLADiLoCo
from tests.quiet import QUIET

pytestmark = [
    pytest.mark.xla,
    pytest.mark.filterwarnings("ignore"),  # Lightning and torch_xla warn about small runs
]


class Line(L.LightningModule):
    """Two layers that learn a fixed linear map; records the number of graphs and syncs before every batch."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.compilations: list[int] = []
        self.syncs: list[int] = []
        self.val_losses: list[float] = []
        self.rates: list[float] = []

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor | None:
        self.compilations.append(xla.num_compilations())
        self.syncs.append(metrics.counter_value("MarkStep") or 0)
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return None

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.val_losses.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / 400))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *_: object) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def loader(batch_size: int = 8) -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(128, 16, generator=generator)
    return DataLoader(TensorDataset(x, x @ torch.randn(16, 4, generator=generator)), batch_size=batch_size)


def trainer_for(root: Path, max_steps: int, **options: object) -> L.Trainer:
    from lightning_diloco import DecoupledDiLoCoStrategy

    strategy = options.pop("strategy", {})
    if isinstance(strategy, dict):
        strategy = DecoupledDiLoCoStrategy(sync_every=4, num_fragments=4, **strategy)
    defaults = {"accelerator": "xla", "devices": 1, "check_val_every_n_epoch": None, "default_root_dir": root, **QUIET}
    return L.Trainer(**{"strategy": strategy, "max_steps": max_steps, **defaults, **options})


@pytest.fixture
def model() -> Line:
    torch.manual_seed(5)
    return Line()


@pytest.mark.parametrize("anchor_device", ["device", "host"])
def test_fit_learns_and_compiles_no_graph_after_the_first_rounds(model, tmp_path, anchor_device, caplog):
    trainer = trainer_for(tmp_path, 300, val_check_interval=100, strategy={"anchor_device": anchor_device})
    trainer.fit(model, loader(), loader())
    assert type(trainer.strategy) is SingleDeviceXLADiLoCo
    assert model.val_losses[-1] < 0.5 * model.val_losses[0]
    assert model.compilations[-1] == model.compilations[180]
    assert f"anchor_device='{anchor_device}': anchors take 0.0 MiB of each of 1 device(s)" in caplog.text
    assert model.rates[99] == pytest.approx(1e-2 * (1 - 100 / 400))
    assert next(model.parameters()).device.type == "cpu"


def test_half_precision_trains_in_half_precision(model, tmp_path):
    seen = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Line, *_: object) -> None:
            seen.append({p.dtype for p in module.parameters()})

    trainer = trainer_for(tmp_path, 40, precision="bf16-true", callbacks=[Look()], val_check_interval=20)
    trainer.fit(model, loader(), loader())
    assert seen == [{torch.bfloat16}] * 40
    assert model.val_losses[-1] < model.val_losses[0]


@pytest.mark.parametrize("manual", [False, True])
def test_accumulation_does_not_grow_the_graph(tmp_path, manual):
    """Every micro-batch is sent to the device before the next one is traced."""
    torch.manual_seed(5)
    model = Line(manual)
    accumulated = {} if manual else {"accumulate_grad_batches": 2}
    trainer_for(tmp_path, 40, limit_val_batches=0, **accumulated).fit(model, loader(4))
    assert len(model.syncs) == 80
    assert all(before < after for before, after in pairwise(model.syncs))
    assert model.compilations[-1] == model.compilations[60]


def test_checkpoint_moves_between_xla_and_cpu(model, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=10, save_top_k=-1, filename="{step}")
    first = trainer_for(tmp_path, 20, callbacks=[saving], enable_checkpointing=True, limit_val_batches=0)
    first.fit(model, loader())
    path = tmp_path / "saved" / "step=10.ckpt"
    content = torch.load(path, map_location="cpu", weights_only=True)
    assert content["global_step"] == 10
    assert all(value.device.type == "cpu" for value in content["state_dict"].values())

    for accelerator in ("cpu", "xla"):
        moved = Line()
        saving = ModelCheckpoint(dirpath=tmp_path / accelerator, every_n_train_steps=15, filename="{step}")
        trainer = trainer_for(
            tmp_path, 15, accelerator=accelerator, callbacks=[saving], enable_checkpointing=True, limit_val_batches=0
        )
        trainer.fit(moved, loader(), ckpt_path=path)
        assert trainer.global_step == 15
        assert len(moved.compilations) == 5
        assert model.rates[14] == pytest.approx(moved.rates[-1])
    back = Line()
    trainer = trainer_for(tmp_path, 18, limit_val_batches=0)
    trainer.fit(back, loader(), ckpt_path=tmp_path / "cpu" / "step=15.ckpt")
    assert trainer.global_step == 18


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "64-true"])
def test_precision_that_xla_does_not_have_is_refused(tmp_path, precision):
    with pytest.raises(ConfigError, match=r"on XLA: must be '32-true', 'bf16-true' or '16-true'"):
        trainer_for(tmp_path, 1, precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("32-true", marks=pytest.mark.thorough), "bf16-true"])
def test_300_exchanges_over_a_bad_link_agree_with_the_host(tmp_path, precision):
    from tests.xla.stress import train_through_adversity

    train_through_adversity(tmp_path, 1, precision)
