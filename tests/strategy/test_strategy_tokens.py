"""What a batch counts as."""

import pytest
import torch

from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.tokens import TokenCounter

IDS = torch.zeros(2, 5, dtype=torch.long)
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])


@pytest.mark.parametrize(
    ("batch", "counted"),
    [
        ({"input_ids": IDS}, (10, "tokens")),
        ({"input_ids": IDS, "attention_mask": MASK}, (7, "tokens")),
        ({"input_ids": IDS, "attention_mask": MASK.to("meta")}, (10, "tokens")),
        ({"input_ids": IDS, "attention_mask": MASK[None]}, (10, "tokens")),
        ({"image": torch.zeros(3, 8)}, (3, "samples")),
        ((torch.zeros(4, 8), torch.zeros(4)), (4, "samples")),
        ([torch.zeros(6)], (6, "samples")),
        (torch.zeros(9, 2), (9, "samples")),
        (torch.zeros(()), (1, "samples")),
        (["a", "b", "c"], (3, "samples")),
    ],
)
def test_batch_counts_tokens_or_samples(batch, counted):
    counter = TokenCounter()
    counter.add(batch)
    assert counter.take() == counted
    assert counter.take() == (0, counted[1])


def test_function_of_the_user_decides():
    counter = TokenCounter(lambda batch: 100 * len(batch))
    assert counter.unit == "tokens"
    counter.add(IDS)
    counter.add(IDS)
    assert counter.take() == (400, "tokens")


def test_batch_of_unknown_size_is_refused():
    with pytest.raises(ConfigError, match="pass token_count_fn"):
        TokenCounter().add(object())


def test_changing_the_unit_is_refused():
    counter = TokenCounter()
    counter.add(IDS)
    with pytest.raises(ConfigError, match="counts tokens, earlier ones counted samples"):
        counter.add({"input_ids": IDS})


def test_step_without_any_batch_is_refused():
    with pytest.raises(ConfigError, match="without a counted batch"):
        TokenCounter().take()
