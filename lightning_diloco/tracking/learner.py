"""A learner's W&B run, with the same metric names for every model.

1. It logs the metrics that Lightning passes to loggers: the user's metrics as `train/*`, validation of the anchor as
   `eval/*`, and this package's metrics as `diloco/*`, `fleet/*` and `perf/*`.
2. A process has one W&B run. If the user has a WandbLogger or an open W&B run, this callback logs a warning and does
   nothing else, because the user's run gets all metrics from Lightning.
3. The W&B run starts after the learner has joined, because run and learner may have no name before.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import wandb
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.loggers import Logger, WandbLogger

from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.hooks import DiLoCoHooks
from lightning_diloco.tracking.session import Session

log = logging.getLogger(__name__)

_PREFIXES = {"train_": "train/", "val_": "eval/", "val/": "eval/"}
_FLOPS_PER_PARAMETER_AND_TOKEN = 6  # forward and backward; Kaplan et al. 2020, attention left out


class Wandb(pl.Callback):
    """Logs this learner to Weights & Biases: `Trainer(strategy="decoupled_diloco", callbacks=[Wandb("project")])`.

    Args:
        project: name of the W&B project.
    """

    def __init__(self, project: str) -> None:
        self._project = project
        self._logger: _SessionLogger | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the W&B run; if a learner has several processes, only the first one does."""
        if not trainer.is_global_zero:
            return
        strategy = trainer.strategy
        if not isinstance(strategy, DiLoCoHooks) or strategy.membership is None:
            raise ConfigError(
                f"callback Wandb with strategy {type(strategy).__name__}: it logs only learners of a run; use "
                'Trainer(strategy="decoupled_diloco"), or Lightning\'s WandbLogger with other strategies'
            )
        if wandb.run is not None or any(isinstance(logger, WandbLogger) for logger in trainer.loggers):
            log.warning("this process already logs to W&B: its run gets all metrics, and no other run is opened")
            return
        run, learner = strategy.membership
        session = Session(
            self._project, run=run, who=learner, folder=Path(trainer.default_root_dir), config=dict(pl_module.hparams)
        )
        self._logger = _SessionLogger(session, _Speed(trainer, pl_module), anchor=strategy.evaluates_anchor)
        trainer.loggers = [*trainer.loggers, self._logger]

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close the W&B run as failed."""
        self._close(trainer, failed=True)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the W&B run, after the final anchor was validated."""
        self._close(trainer, failed=False)

    def _close(self, trainer: pl.Trainer, *, failed: bool) -> None:
        if (logger := self._logger) is not None:
            self._logger = None
            trainer.loggers = [other for other in trainer.loggers if other is not logger]
            logger.session.finish(failed=failed)


class _SessionLogger(Logger):
    """A Lightning logger that logs to a session."""

    def __init__(self, session: Session, speed: _Speed, *, anchor: bool) -> None:
        super().__init__()
        self.session = session
        self._speed = speed
        self._prefixes = _PREFIXES if anchor else {"train_": "train/"}

    @property
    def name(self) -> str:
        return "wandb"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        named = {self._named(name): value for name, value in metrics.items()}
        self.session.log({**named, **self._speed.of(metrics), "trainer/global_step": step})

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        self.session.configure(vars(params) if isinstance(params, Namespace) else params)

    def _named(self, name: str) -> str:
        found = next((prefix for prefix in self._prefixes if name.startswith(prefix)), "")
        return self._prefixes.get(found, "") + name.removeprefix(found)


class _Speed:
    """Model FLOP/s from tokens per second, and their share of the device's peak if it is known."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._flops_per_token = _FLOPS_PER_PARAMETER_AND_TOKEN * sum(p.numel() for p in module.parameters())
        device = trainer.strategy.root_device
        half = {"bf": torch.bfloat16, "16": torch.float16}.get(str(trainer.precision)[:2], torch.float32)
        self._peak = None if device.type == "cpu" else get_available_flops(device, half)

    def of(self, metrics: Mapping[str, float]) -> dict[str, float | None]:
        """Return `perf/tflops` and `perf/mfu`, the latter None if the device's peak is unknown."""
        if not (rate := metrics.get("perf/tokens_per_s")):
            return {}
        flops = rate * self._flops_per_token
        return {"perf/tflops": flops / 1e12, "perf/mfu": flops / self._peak if self._peak else None}
