"""Small tasks for benches that need many runs; each takes seconds on one core.

1. `Classifier` learns the labels of a random teacher, which no model learns fully.
2. `Gan` trains two networks against each other with two optimizers, the usual case of manual optimization. Its loss is
   the energy distance between its samples and the data (a ring of eight Gaussians).
3. Learner m of M reads every Mth sample, in its own order. If data are leased, the learner that asks next reads the
   next samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH = 64
NUM_TRAIN, NUM_VAL = 20_000, 4_000
Batch = tuple[Tensor, ...]


class Task:
    """Data, and models that train on it.

    Args:
        seed: seed of weights and orders; the data are always the same.
    """

    train: Batch
    val: Batch

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def batches(self, part: int, parts: int) -> Iterator[Batch]:
        """Yield one learner's batches, epoch after epoch."""
        generator = torch.Generator().manual_seed(1000 * self.seed + part)
        own = torch.arange(part, NUM_TRAIN, parts)
        while True:
            order = own[torch.randperm(len(own), generator=generator)]
            for start in range(0, len(order) - BATCH + 1, BATCH):
                yield tuple(values[order[start : start + BATCH]] for values in self.train)

    def leased_batches(self, learners: int) -> list[Iterator[Batch]]:
        """Return a stream of batches for each learner; all take the next batch of one common order."""
        return [self.batches(0, 1)] * learners

    def joined_batches(self, parts: int) -> Iterator[Batch]:
        """Yield the joined batches of all learners, as in data-parallel training."""
        for batches in zip(*(self.batches(part, parts) for part in range(parts)), strict=True):
            yield tuple(torch.cat(values) for values in zip(*batches, strict=True))

    def model(self) -> Any:
        """Create a model with random weights and its optimizers."""
        raise NotImplementedError

    def plain(self, *, parts: int, steps: int) -> float:
        """Return the validation loss of one model that trains on the batches of all learners."""
        model = self.model()
        for batch in itertools.islice(self.joined_batches(parts), steps):
            model.step(batch)
        return float(model.validation_loss())


def _net(*sizes: int) -> nn.Sequential:
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Classifier(Task):
    """Ten classes of vectors of 32 numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        generator = torch.Generator().manual_seed(0)
        first, second = (torch.randn(shape, generator=generator) for shape in ((32, 64), (64, 10)))
        inputs = torch.randn(NUM_TRAIN + NUM_VAL, 32, generator=generator)
        labels = (torch.tanh(inputs @ first / 3) @ second).argmax(1)
        self.train = inputs[:NUM_TRAIN], labels[:NUM_TRAIN]
        self.val = inputs[NUM_TRAIN:], labels[NUM_TRAIN:]

    def model(self) -> _Classifying:
        torch.manual_seed(self.seed)
        return _Classifying(self.val)


class _Classifying:
    def __init__(self, val: Batch) -> None:
        self.module = _net(32, 128, 128, 10)
        self._val = val
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=2e-3)

    def step(self, batch: Batch) -> int:
        inputs, labels = batch
        loss = functional.cross_entropy(self.module(inputs), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return len(labels)

    @torch.no_grad()
    def validation_loss(self) -> float:
        inputs, labels = self._val
        return float(functional.cross_entropy(self.module(inputs), labels))


class Gan(Task):
    """Points on a ring."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        generator = torch.Generator().manual_seed(0)
        angles = torch.randint(8, (NUM_TRAIN + NUM_VAL,), generator=generator) * (math.tau / 8)
        points = 2 * torch.stack((angles.cos(), angles.sin()), dim=1)
        points += 0.3 * torch.randn(points.shape, generator=generator)
        self.train, self.val = (points[:NUM_TRAIN],), (points[NUM_TRAIN:],)

    def model(self) -> _Adversarial:
        torch.manual_seed(self.seed)
        return _Adversarial(self.val[0])


class _Adversarial:
    def __init__(self, val: Tensor) -> None:
        self.module = nn.ModuleDict({"generator": _net(8, 64, 64, 2), "critic": _net(2, 64, 64, 1)})
        self._val = val
        self._noise = torch.Generator().manual_seed(torch.initial_seed())
        self._optimizers = {
            name: torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.0, 0.99)) for name, part in self.module.items()
        }

    def _made(self, num: int) -> Tensor:
        return self.module["generator"](torch.randn(num, 8, generator=self._noise))

    def step(self, batch: Batch) -> int:
        real, critic = batch[0].clone().requires_grad_(), self.module["critic"]
        made, judged = self._made(len(real)), critic(real)
        (slope,) = torch.autograd.grad(judged.sum(), real, create_graph=True)
        penalty = slope.square().sum(1, keepdim=True)  # the R1 penalty, which prevents oscillation of the two networks
        self._descend("critic", functional.softplus(-judged) + functional.softplus(critic(made.detach())) + penalty)
        self._descend("generator", functional.softplus(-critic(made)))
        return len(real)

    def _descend(self, name: str, loss: Tensor) -> None:
        self._optimizers[name].zero_grad()
        loss.mean().backward()
        self._optimizers[name].step()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the energy distance, which is 0 for equal distributions."""
        self._noise.manual_seed(0)
        made, real = self._made(2000), self._val[:2000]
        between, within = (
            torch.cdist(made, real).mean(),
            torch.cdist(made, made).mean() + torch.cdist(real, real).mean(),
        )
        return float(2 * between - within)


TASKS = {"classifier": Classifier, "gan": Gan}
