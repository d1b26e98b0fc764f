"""The model, data and optimizer of the tiny recipe, one step at a time and without a Trainer.

1. All values come from recipes/tiny/gpt.yaml, except those that a benchmark passes.
2. Learner m of M reads the same data as in a run, through the strategy's split of the recipe's loader.
3. The data-parallel model reads the joined batches, so it sees the same tokens in the same step.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from torch import Tensor

from lightning_diloco.hf import CausalLM, TextData
from lightning_diloco.strategy.data.split import split
from tests.bench.muon import MuonAdamW

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny" / "gpt.yaml"
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class _Trainer:
    """The attributes that a module reads from its trainer before the first step."""

    estimated_stepping_batches: int
    datamodule: TextData


class Tiny:
    """A recipe file and its model and data.

    Args:
        path: path of the recipe.
        model: overrides of model options.
        data: overrides of data options.
        optimizer: "adamw" as in the recipe, or "muon"; see `muon.py`.
    """

    def __init__(
        self,
        path: Path = RECIPE,
        *,
        model: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        optimizer: str = "adamw",
    ) -> None:
        self.path, self._optimizer = path, optimizer
        self.recipe = yaml.safe_load(path.read_text())
        self._model = {**self.recipe["model"]["init_args"], **(model or {})}
        self._data = {**self.recipe["data"]["init_args"], **(data or {})}

    @property
    def strategy(self) -> dict[str, Any]:
        """The recipe's options of the strategy."""
        return dict(self.recipe["trainer"]["strategy"]["init_args"])

    @property
    def lr(self) -> float:
        """The inner learning rate."""
        return float(self._model["lr"])

    @property
    def batch_size(self) -> int:
        """Sequences in a batch of one learner."""
        return int(self._data["batch_size"])

    @property
    def text_mb(self) -> float:
        """Megabytes of text, of which most is for training."""
        return float(self._data["max_bytes"]) / 1e6

    @property
    def num_steps(self) -> int:
        """The recipe's number of inner steps."""
        return int(self.recipe["trainer"]["max_steps"])

    @cached_property
    def data(self) -> TextData:
        """The recipe's data, prepared; tokens are cached on disk."""
        data = TextData(**self._data)
        data.prepare_data()
        data.setup()
        return data

    def batches(self, seed: int, part: int, parts: int) -> Iterator[Batch]:
        """Yield one learner's batches, epoch after epoch.

        Args:
            seed: seed of the order; equal for all learners.
            part: index of the learner, 0..parts-1.
            parts: number of learners.
        """
        loader = split(self.data.train_dataloader(), part, parts, seed=seed)
        for epoch in itertools.count():
            if hasattr(loader.sampler, "set_epoch"):  # type: ignore[attr-defined]
                loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            yield from loader  # type: ignore[misc]

    def joined_batches(self, seed: int, parts: int) -> Iterator[Batch]:
        """Yield the joined batches of all learners, as in data-parallel training."""
        for batches in zip(*(self.batches(seed, part, parts) for part in range(parts)), strict=True):
            yield {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}

    def model(self, seed: int, num_steps: int) -> Trainee:
        """Create a model with random weights and an optimizer.

        Args:
            seed: seed of the weights.
            num_steps: end of the learning-rate schedule.
        """
        L.seed_everything(seed, verbose=False)
        module = CausalLM(**copy.deepcopy(self._model))
        is_muon = self._optimizer == "muon"
        return Trainee(module, self.data, num_steps, self.recipe["trainer"]["gradient_clip_val"], is_muon=is_muon)


class Trainee:
    """A model that is trained one step at a time."""

    def __init__(self, module: CausalLM, data: TextData, num_steps: int, clip: float, *, is_muon: bool = False) -> None:
        self.module, self._data, self._clip = module, data, clip
        self._trainer = _Trainer(num_steps, data)
        module._trainer = self._trainer  # type: ignore[assignment]
        module.log = lambda *_, **__: None  # type: ignore[method-assign]
        module.configure_model()
        options = module.hparams
        self._optimizer = module.configure_optimizers()["optimizer"]
        if is_muon:
            self._optimizer = MuonAdamW(module, options.lr, options.weight_decay, tuple(options.betas))
        self._schedule = module._schedule(self._optimizer)

    def step(self, batch: Batch) -> int:
        """Make one inner step; return the batch's tokens."""
        loss = self.module.training_step(batch, 0)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._clip)
        self._optimizer.step()
        self._schedule.step()
        return batch["input_ids"].numel()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return nats per token over the whole validation split."""
        self.module.eval()
        self.module.val_loss.reset()
        for index, batch in enumerate(self._data.val_dataloader()):
            self.module.validation_step(batch, index)
        self.module.train()
        return float(self.module.val_loss.compute())
