"""A link without a network, a small model, and a Trainer: the seam between strategy and link."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.connectors import callback_connector
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import FragmentDevice, Update
from lightning_diloco.learner.ranks.agreement import Agreement
from lightning_diloco.learner.status import LearnerStatus
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.strategy import identity
from tests.quiet import QUIET

STANDING = LearnerStatus((3, 4), 1, (2,), 2, None)
VOCABULARY, LENGTH, NUM_SAMPLES = 11, 6, 24

# Lightning warns about small CPU runs; these warnings do not concern this package.
THIRD_PARTY_WARNINGS = (
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:The number of training batches .* is smaller than the logging interval",
    "ignore:`max_epochs` was not set",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated",
    "ignore:Starting from v1.9.0, `tensorboardX` has been removed",
    "ignore:Found .* module\\(s\\) in eval mode at the start of training",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for warning in THIRD_PARTY_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@dataclass
class Scenario:
    """Settings of the links of one test, and the links that were made."""

    data_part: tuple[int, int] | None = None
    slot: int | None = None  # None: that of the part
    data_seed: int = 0
    learner_id: str = "l0"
    start_error: Exception | None = None
    step_error: Exception | None = None
    run_values: float | None = None  # the run exists, and all values of its anchors are this
    standing: LearnerStatus = STANDING
    incarnation: int = 1
    is_late: bool = False  # the run has made steps before this learner joins
    run_steps: int = 0  # number of these steps
    is_last: bool = False  # no other learner is in the run when this one leaves
    others_tokens: int = 0
    differing: tuple[str, ...] = ()  # frozen parameters that differ from those of the run
    lands: bool = True  # each step changes an anchor; otherwise nothing is merged until the end
    while_draining: Callable[[], None] | None = None  # called during the wait for the last contributions
    stopped_after: int | None = None  # the run is over when this learner has made this number of steps
    made: list[RecordingLink] = field(default_factory=list)

    @property
    def link(self) -> RecordingLink:
        assert len(self.made) == 1, f"{len(self.made)} links were made"
        return self.made[0]


class RecordingLink:
    """The link of a single learner: it seeds, records its calls, and at the end adds 1 to every anchor."""

    scenario: Scenario

    def __init__(self, run_options: dict[str, Any], learner: LearnerConfig, root_dir: Path | None) -> None:
        self.run_options, self.learner, self.root_dir = run_options, learner, root_dir
        self.learner_id, self.data_part = self.scenario.learner_id, None
        self.run, self.incarnation, self.is_late = "run", self.scenario.incarnation, self.scenario.is_late
        self.run_steps = self.scenario.run_steps
        self.differing = self.scenario.differing
        self.own_run_dir: Path | None = None
        self.agreed, self.is_preempted = Agreement(), False
        self.lock = threading.Lock()  # cannot be copied, like all objects of a run
        self.events: list[str] = []
        self.boundary: list[torch.Tensor] = []  # parameters where the last step ended
        self.unchanged: list[bool] = []  # by step: whether they were unchanged at the first `settle`
        self.num_settled = 0
        self.drained: list[torch.Tensor] = []  # parameters when the last contributions were made
        self.steps: list[tuple[int, str]] = []
        self.losses: list[float] = []
        self.eval_losses: list[float] = []
        self.reports: list[tuple[float | None, str | None]] = []
        self.scenario.made.append(self)

    def start(
        self, model: ModelDescription, make_device: Callable[[FragmentPlan, RunConfig], FragmentDevice[Any, Any]]
    ) -> None:
        self.events.append("start")
        if self.scenario.start_error:
            raise self.scenario.start_error
        self.model = model
        self.config = RunConfig(**self.run_options)
        self.plan = FragmentPlan.balanced(
            model.shapes,
            num_fragments=self.config.fragments_wanted,
            max_slice_numel=self.config.max_slice_numel,
            mean_names=model.mean_names,
        )
        self.device = make_device(self.plan, self.config)
        for p in range(self.plan.num_fragments):
            values = self.device.local_values(p)
            self.device.adopt(
                p, values if self.scenario.run_values is None else torch.full_like(values, self.scenario.run_values)
            )
        self.data_part, self.data_seed, slot = self.scenario.data_part, self.scenario.data_seed, self.scenario.slot
        part, parts = self.data_part or (0, None)
        self.slot = part if slot is None else slot
        self.config = replace(self.config, data_parts=parts)

    @property
    def num_landings(self) -> int:
        return len(self.steps) if self.scenario.lands else 0

    @property
    def is_drained(self) -> bool:
        return self.scenario.lands

    @property
    def fleet_tokens(self) -> int:
        return self.scenario.others_tokens + sum(tokens for tokens, _ in self.steps)

    @property
    def stopped(self) -> str | None:
        after = self.scenario.stopped_after
        return "enough" if after is not None and len(self.steps) >= after else None

    def stop_run(self, reason: str) -> None:
        self.events.append(f"stop the run: {reason}")

    def step(self, tokens: int, unit: str) -> None:
        self.events.append("step")
        self.steps.append((tokens, unit))
        self.boundary = self._parameters()
        if self.scenario.step_error:
            raise self.scenario.step_error

    def settle(self) -> None:
        self.num_settled += 1
        if self.boundary:
            self.unchanged.append(all(map(torch.equal, self.boundary, self._parameters())))
            self.boundary = []

    def _parameters(self) -> list[torch.Tensor]:
        return [self.device.local_values(p) for p in range(self.plan.num_fragments)]

    def set_evaluating(self, evaluating: bool) -> None:
        self.events.append("evaluating" if evaluating else "training")

    def set_loss(self, read: Callable[[], float | None], *, aside: bool) -> None:
        assert not aside, "on the CPU it is there"
        if (loss := read()) is not None:
            self.losses.append(loss)

    def set_eval_loss(self, loss: float) -> None:
        self.eval_losses.append(loss)

    def standing(self) -> LearnerStatus:
        return self.scenario.standing

    def held_up(self, for_s: float) -> None:
        self.events.append("held up")

    def finish(
        self, reason: str = "finished", within_s: float | None = None, asked: Callable[[], float | None] = lambda: None
    ) -> bool:
        self.events.append("finish" if reason == "finished" else reason)
        if self.scenario.while_draining is not None:
            self.scenario.while_draining()
        self.is_preempted = asked() is not None
        self.drained = self._parameters()
        for p in range(self.plan.num_fragments) if self.scenario.lands else ():
            full = Update(full=self.device.anchor(p) + 1, chain=(), sent=None)
            self.device.land(p, self.device.stage(p, full))
        return self.scenario.is_last

    def report(self, eval_loss: float | None, reason: str | None = None) -> None:
        self.events.append("report")
        self.reports.append((eval_loss, reason))

    def close(self) -> None:
        self.events.append("close")

    def metrics(self) -> dict[str, float]:
        return {"diloco/steps": float(len(self.steps))}


@pytest.fixture
def scenario(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """Replaces the link of the strategy by RecordingLink."""
    module = ModuleType("lightning_diloco.learner.member")
    made = Scenario()
    module.Member = type("Member", (RecordingLink,), {"scenario": made})  # type: ignore[attr-defined]
    whereabouts = ModuleType("lightning_diloco.learner.whereabouts")
    whereabouts.agreed_parts = lambda learner: made.data_part and made.data_part[1]  # type: ignore[attr-defined]
    for each in (module, whereabouts):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(identity, "_done", set())  # each test counts as a new process
    monkeypatch.delenv("DILOCO_LEARNER", raising=False)
    monkeypatch.delenv("DILOCO_RUN_DIR", raising=False)
    return made


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sample k has its index and LENGTH token ids."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(LENGTH) * (index + 1)) % VOCABULARY
        return {"input_ids": ids, "index": torch.tensor(index)}


class TinyModel(L.LightningModule):
    """An embedding with a tied head, a frozen layer and a buffer; records the samples that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.body = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(()))
        self.learning_rate, self.batch_size = 0.1, 4
        self.seen: list[int] = []
        self.validated: list[torch.Tensor] = []
        self.noise: list[float] = []

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.frozen(torch.relu(self.body(self.embedding(batch["input_ids"]))))
        logits = self.head(hidden * self.scale)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen += batch["index"].tolist()
        self.noise.append(torch.rand(()).item())
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.validated.append(self.body.weight.detach().clone())
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.learning_rate)

    def train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return DataLoader(Sequences(), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return DataLoader(Sequences(), batch_size=NUM_SAMPLES)

    test_dataloader = predict_dataloader = val_dataloader


@pytest.fixture
def model() -> TinyModel:
    torch.manual_seed(7)
    return TinyModel()


@pytest.fixture(scope="session", autouse=True)
def _extensions() -> Iterator[None]:
    """Cache the callbacks of installed packages: each Trainer looks for them, which takes 10 ms."""
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(callback_connector._load_external_callbacks)
        patch.setattr(callback_connector, "_load_external_callbacks", once)
        yield


@pytest.fixture
def trainer_for(tmp_path: Path) -> Callable[..., L.Trainer]:
    """Makes a quiet CPU Trainer with our strategy; any argument can be overridden."""

    def make(**options: Any) -> L.Trainer:
        defaults = {"accelerator": "cpu", "devices": 1, "max_steps": 4, "default_root_dir": tmp_path, **QUIET}
        return L.Trainer(**{"strategy": "decoupled_diloco", **defaults, **options})

    return make
