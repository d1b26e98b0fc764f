"""Counts of tokens and samples of batches."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.data.token_counter import TokenCounter

IDS = torch.zeros(2, 5, dtype=torch.long)
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])


@dataclass
class Pair:
    name: str
    image: torch.Tensor


class Graph:
    """A graph like that of torch_geometric: pairs of names and values."""

    def __iter__(self) -> Iterator[tuple[str, object]]:
        yield from {"kind": "a", "x": torch.zeros(8, 3)}.items()


@pytest.mark.parametrize(
    ("batch", "counted"),
    [
        ({"input_ids": IDS}, (10, "tokens")),
        ({"input_ids": IDS, "attention_mask": MASK}, (7, "tokens")),
        ({"input_ids": IDS, "attention_mask": MASK.to("meta")}, (10, "tokens")),
        ({"input_ids": IDS, "attention_mask": MASK[None]}, (10, "tokens")),
        ({"input_ids": IDS, "attention_mask": MASK.bool()}, (7, "tokens")),
        ({"input_ids": IDS, "attention_mask": torch.zeros(2, 5)}, (10, "tokens")),  # is added: all are visible
        ({"input_ids": IDS, "attention_mask": torch.full((2, 5), -torch.inf)}, (10, "tokens")),
        ({"input_ids": IDS, "attention_mask": torch.zeros(2, 5, dtype=torch.bool)}, (10, "tokens")),
        ({"input_ids": IDS, "attention_mask": -MASK}, (10, "tokens")),
        ({"edges": torch.empty(0, 3), "nodes": torch.zeros(4, 3)}, (4, "samples")),
        ({"image": torch.zeros(3, 8)}, (3, "samples")),
        ((torch.zeros(4, 8), torch.zeros(4)), (4, "samples")),
        ([torch.zeros(6)], (6, "samples")),
        (torch.zeros(9, 2), (9, "samples")),
        (torch.zeros(()), (1, "samples")),
        (["a", "b", "c"], (3, "samples")),
        (Pair("name", torch.zeros(5, 2)), (5, "samples")),
        ({"name": "text", "image": np.zeros((7, 2))}, (7, "samples")),
        (np.float32(1.0), (1, "samples")),
        (Graph(), (8, "samples")),
    ],
)
def test_batch_counts_tokens_or_samples(batch, counted):
    counter = TokenCounter()
    counter.add(batch)
    assert counter.take() == counted
    assert counter.take() == (0, counted[1])


def test_the_users_function_takes_precedence():
    counter = TokenCounter(lambda batch: 100 * len(batch))
    assert counter.unit == "tokens"
    counter.add(IDS)
    counter.add(IDS)
    assert counter.take() == (400, "tokens")


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), torch.tensor(-2.0)])
def test_an_invalid_count_is_refused(count):
    with pytest.raises(ConfigError, match=r"token_count_fn returned .*: it must return .* finite and at least 0"):
        TokenCounter(lambda batch: count).add(IDS)


def test_a_step_without_a_token_is_not_lost(scenario, model, trainer_for):
    strategy = DecoupledDiLoCoStrategy(token_count_fn=lambda batch: 0)
    trainer_for(strategy=strategy, max_steps=2, limit_val_batches=0).fit(model)
    assert scenario.link.steps == [(1, "tokens")] * 2


@pytest.mark.parametrize(
    "batch", [3, "text", {}, object(), iter([torch.zeros(2)])], ids=["int", "str", "empty", "object", "iterator"]
)
def test_batch_of_unknown_size_counts_as_one_with_one_warning(batch):
    counter = TokenCounter()
    with pytest.warns(UserWarning, match=f"A batch of type {type(batch).__name__} has no size that can be found"):
        counter.add(batch)
    counter.add(batch)  # a warning would be an error
    assert counter.take() == (2, "samples")


def test_none_does_not_count_as_a_batch():
    counter = TokenCounter()
    counter.add({"input_ids": IDS})
    counter.add(None)
    assert counter.take() == (10, "tokens")


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None", "ignore:A batch of type")
@pytest.mark.parametrize(
    "batches", [["text"] * 4, [3] * 4, [None, torch.zeros(2), None, torch.zeros(2)]], ids=["text", "numbers", "None"]
)
def test_any_batch_that_lightning_accepts_trains(scenario, model, trainer_for, monkeypatch, batches):
    monkeypatch.setattr(type(model), "training_step", lambda self, batch, batch_idx: self.body.weight.sum())
    trainer_for(max_steps=2, limit_val_batches=0).fit(model, DataLoader(batches, batch_size=None))
    assert [unit for _, unit in scenario.link.steps] == ["samples"] * 2


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_a_training_step_that_takes_batches_itself_is_refused_before_anything_is_joined(
    scenario, model, trainer_for, monkeypatch
):
    monkeypatch.setattr(type(model), "training_step", lambda self, dataloader_iter: None)
    with pytest.raises(ConfigError, match=r"use training_step\(self, batch, batch_idx\)"):
        trainer_for().fit(model)
    assert scenario.made == []


def test_changing_the_unit_is_refused():
    counter = TokenCounter()
    counter.add(IDS)
    with pytest.raises(ConfigError, match="counts tokens, earlier ones counted samples"):
        counter.add({"input_ids": IDS})


def test_step_without_any_batch_is_refused():
    with pytest.raises(ConfigError, match="without a counted batch"):
        TokenCounter().take()
