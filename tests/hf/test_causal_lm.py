"""Building, training and validating a causal language model."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_diloco.errors import ConfigError
from lightning_diloco.hf import CausalLM, TextData
from tests.quiet import QUIET

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*' does not have many workers"),
    # Lightning 2.6 asks in a way that torch deprecates.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
VOCAB = 64


def _rows(num_rows: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(VOCAB, (num_rows, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def _trainer(tmp_path: Path, **options: Any) -> L.Trainer:
    return L.Trainer(
        default_root_dir=tmp_path, **{**QUIET, "accelerator": "cpu", "devices": 1, "max_steps": 3, **options}
    )


def _built(**options: Any) -> CausalLM:
    model = CausalLM(**{"config": {**LLAMA, "vocab_size": VOCAB}, **options})
    model.configure_model()
    return model


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    rows, model = DataLoader(_rows(8), batch_size=8), _built(lr=1e-2)
    batch = next(iter(rows))
    before = model(**batch).loss.item()
    trainer = _trainer(tmp_path)
    trainer.fit(model, rows, rows)
    assert trainer.global_step == 3
    assert trainer.callback_metrics["train/loss"] < before
    assert model(**batch).loss < before


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_validation_counts_every_token_once(tmp_path: Path, config: dict[str, Any]) -> None:
    rows = _rows(5)  # batches of 2, 2 and 1
    rows[4]["labels"][:5] = -100
    model = _built(config={**config, "vocab_size": VOCAB})
    result = _trainer(tmp_path).validate(model, DataLoader(rows, batch_size=2), verbose=False)[0]

    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.stack([row["input_ids"] for row in rows])).logits.double()
    labels = torch.stack([row["labels"] for row in rows])
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100).item()
    assert result["val/loss"] == pytest.approx(expected, rel=1e-5)
    assert result["val/perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_validation_sums_in_float32_when_the_module_is_cast(dtype: torch.dtype) -> None:
    model = _built().to(dtype)  # as Lightning does for precision="bf16-true" and "16-true"
    assert {p.dtype for p in model.parameters()} == {dtype}
    for metric, expected in [(model.val_loss, 4.161), (model.val_perplexity, math.exp(4.161))]:
        for _ in range(100):
            metric.update(torch.tensor(4161.0), torch.tensor(1000))  # the sum is above float16's largest value
        assert metric.compute().item() == pytest.approx(expected, rel=1e-4)


def test_vocabulary_comes_from_the_data_and_is_saved_in_the_checkpoint(
    tmp_path: Path, texts: Path, cache_dir: Path
) -> None:
    data = TextData(files=str(texts / "*.txt"), vocab_size=300, seq_len=16, batch_size=4, cache_dir=str(cache_dir))
    model, trainer = CausalLM(config=LLAMA), _trainer(tmp_path)
    trainer.fit(model, data)
    assert model.model.config.vocab_size == len(data.tokenizer)
    assert model.model.config.eos_token_id == data.tokenizer.eos_token_id
    assert "vocab_size" not in LLAMA

    trainer.save_checkpoint(tmp_path / "model.ckpt", weights_only=False)
    loaded = CausalLM.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_equal_seeds_build_equal_models() -> None:
    states = []
    for seed in (1, 1, 2):
        L.seed_everything(seed, verbose=False)
        states.append(_built().state_dict()["model.model.embed_tokens.weight"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_pretrained_weights_are_trained_in_float32(tmp_path: Path) -> None:
    published = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, vocab_size=VOCAB), dtype=torch.bfloat16)
    published.save_pretrained(tmp_path / "published")
    loaded, fresh = (_built(name=str(tmp_path / "published"), config=None, from_scratch=new) for new in (False, True))
    assert loaded.model.training
    for (name, value), other in zip(published.named_parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(loaded.model.get_parameter(name), value.float())
        assert other.dtype == torch.float32
    assert not torch.equal(fresh.model.lm_head.weight, loaded.model.lm_head.weight)


def test_norms_and_biases_are_not_decayed() -> None:
    model = _built(config={**GPT2, "vocab_size": VOCAB}, schedule="constant")
    decayed, free = model.configure_optimizers()["optimizer"].param_groups
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in free["params"]} == {1}
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize(("schedule", "last"), [("cosine", 0.1), ("constant", 1.0)])
def test_learning_rate_warms_up_and_ends_at_its_final_value(tmp_path: Path, schedule: str, last: float) -> None:
    model = _built(lr=1.0, warmup_steps=2, schedule=schedule)
    trainer = _trainer(tmp_path, max_steps=6)
    rates: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer.callbacks.append(Watch())
    rows = DataLoader(_rows(2), batch_size=2)
    trainer.fit(model, rows, rows)
    assert rates[:2] == [0.5, 1.0]
    assert max(rates) == 1.0
    assert rates[-1] == pytest.approx(last)


def test_cosine_without_an_end_is_refused(tmp_path: Path) -> None:
    rows = DataLoader(_rows(2), batch_size=2)
    with pytest.raises(ConfigError, match=r"set trainer\.max_steps"):
        _trainer(tmp_path, max_steps=-1, max_epochs=-1).fit(_built(), rows, rows)


def test_unknown_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="config has no vocab_size"):
        CausalLM(config=LLAMA).configure_model()


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tmp_path: Path, texts: Path, cache_dir: Path) -> None:
    data = TextData(files=str(texts / "*.txt"), vocab_size=300, seq_len=16, batch_size=4, cache_dir=str(cache_dir))
    with pytest.raises(ConfigError, match=r"vocab_size is 64, the tokenizer has \d+ tokens"):
        _trainer(tmp_path).fit(CausalLM(config={**LLAMA, "vocab_size": VOCAB}), data)


def test_bad_options_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        CausalLM(config={"model_type": "lama"}, lr=0.0, betas=(0.9, 1.0), schedule="linear")  # type: ignore[arg-type]
    problems = caught.value.problems
    assert [problem.split("=")[0] for problem in problems] == ["config.model_type", "lr", "betas", "schedule"]
    assert "'cosine', 'constant'" in problems[3]


def test_a_misspelt_field_of_the_models_config_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        CausalLM(config={**LLAMA, "num_hiden_layers": 2, "rope_theta": 5e5, "of_my_own": 1})
    (problem,) = caught.value.problems
    assert problem == "config.num_hiden_layers=2: a llama model has no such field; did you mean 'num_hidden_layers'?"


@pytest.mark.parametrize("from_scratch", [True, False])
def test_a_model_that_is_not_local_and_cannot_be_downloaded_is_refused(from_scratch: bool) -> None:
    with pytest.raises(ConfigError, match=r"name='nobody/nothing' was not found or not reached .*`hf download nobody/"):
        CausalLM(name="nobody/nothing", from_scratch=from_scratch).configure_model()


@pytest.mark.parametrize(("options", "given"), [({}, "neither"), ({"name": "a", "config": LLAMA}, "both")])
def test_a_model_is_given_by_name_or_by_config(options: dict[str, Any], given: str) -> None:
    with pytest.raises(ConfigError, match=f"{given} of name and config given"):
        CausalLM(**options)


class _Fleet:
    """A trainer whose strategy has fleet tokens."""

    def __init__(self) -> None:
        self.strategy, self.fleet_tokens = self, 0

    def broadcast(self, value: int) -> int:
        return value


@pytest.mark.parametrize(("schedule", "half_way", "end"), [("cosine", 0.55, 0.1), ("constant", 1.0, 1.0)])
def test_a_schedule_follows_the_tokens_of_the_fleet(
    schedule: str, half_way: float, end: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fleet = _built(lr=1.0, schedule=schedule, warmup_tokens=100, schedule_tokens=1100), _Fleet()
    monkeypatch.setattr(CausalLM, "trainer", fleet)
    made = model.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for tokens, rate in [(50, 0.5), (600, half_way), (1100, end), (9999, end)]:
        fleet.fleet_tokens = tokens
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule_tokens": 5, "warmup_tokens": 5}, "schedule_tokens=5: must be above warmup_tokens=5"),
        ({"schedule_tokens": 5, "warmup_steps": 1}, "warmup_steps=1 with schedule_tokens: must be 0"),
        ({"warmup_tokens": 5}, "must be 0 without schedule_tokens"),
    ],
)
def test_schedules_cannot_mix_steps_and_tokens(options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CausalLM(name="somewhere", **options)
