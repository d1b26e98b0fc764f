"""Fine-tuning: runs that start from pretrained weights, adapters next to a frozen base, and their exports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.cli.main import main
from lightning_diloco.errors import ConfigError
from lightning_diloco.hf import CausalLM
from lightning_diloco.hf.export import ADAPTER, CHECKPOINT
from lightning_diloco.manifest import plan_of
from lightning_diloco.strategy.anchor import read_anchor
from lightning_diloco.strategy.trainer.parameters import describe, named_values, trainable_parameters
from tests.quiet import QUIET

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*' does not have many workers"),
    # Lightning 2.6 asks in a way that torch deprecates.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    # peft 0.21, of transformers 5.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
VOCAB = 64


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """Return a transformers folder with tied weights."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "pretrained")
    return tmp_path / "pretrained"


def built(**options: Any) -> CausalLM:
    model = CausalLM(**options)
    model.configure_model()
    return model


def fit(module: CausalLM, root: Path, *, num_steps: int) -> Path:
    """Train alone, with an embedded syncer; return RUN_DIR."""
    tokens = torch.randint(VOCAB, (num_steps, 8))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = L.Trainer(
        strategy=DecoupledDiLoCoStrategy(sync_every=2, num_fragments=2, overlap=1), accelerator="cpu", devices=1,
        max_steps=num_steps, default_root_dir=root, **QUIET,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=1), DataLoader(rows[:2], batch_size=1))
    (run_dir,) = (root / "diloco").iterdir()
    return run_dir


def anchor_of(run_dir: Path, module: CausalLM) -> dict[str, torch.Tensor]:
    manifest, store = read_anchor(run_dir)
    plan, config = plan_of(manifest)
    params = trainable_parameters(module)
    return named_values(plan, config.block_size, params, lambda p: store.anchor(p).published)


def export(run_dir: Path, to: Path, **options: Any) -> int:
    config = to.with_suffix(".yaml")
    config.write_text(yaml.safe_dump({"model": {"class_path": "lightning_diloco.hf.CausalLM", "init_args": options}}))
    return main(["export", str(run_dir), "--to", str(to), "--config", str(config)])


@pytest.mark.slow
def test_a_run_starts_from_pretrained_weights_and_is_exported(pretrained: Path, tmp_path: Path) -> None:
    start = AutoModelForCausalLM.from_pretrained(pretrained).state_dict()
    module = CausalLM(name=str(pretrained), lr=1e-6)
    run_dir = fit(module, tmp_path, num_steps=4)
    anchor = anchor_of(run_dir, module)
    assert all(torch.allclose(value, start[name.removeprefix("model.")], atol=1e-4) for name, value in anchor.items())
    assert any(not torch.equal(value, start[name.removeprefix("model.")]) for name, value in anchor.items())
    assert export(run_dir, tmp_path / "out", name=str(pretrained)) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert all(torch.equal(value, anchor[f"model.{name}"]) for name, value in found.named_parameters())


@pytest.mark.slow
def test_a_run_with_an_adapter_exchanges_and_exports_only_the_adapter(pretrained: Path, tmp_path: Path) -> None:
    options = {"name": str(pretrained), "adapter": LORA}
    module = CausalLM(**options, lr=0.05)
    run_dir = fit(module, tmp_path, num_steps=4)
    anchor = anchor_of(run_dir, module)
    assert len(anchor) == 2 * 2 * 2
    assert all("lora_" in name for name in anchor)
    trained = built(**options)
    trained.load_state_dict(anchor, strict=False)
    tokens = torch.arange(8).unsqueeze(0)
    wanted = trained.eval()(input_ids=tokens).logits
    assert not torch.allclose(wanted, built(name=str(pretrained)).eval()(input_ids=tokens).logits, atol=1e-3)

    assert export(run_dir, tmp_path / "out", **options) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(merged(input_ids=tokens).logits, wanted, atol=1e-5)
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(pretrained)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / ADAPTER)
    assert torch.allclose(adapted(input_ids=tokens).logits, wanted, atol=1e-5)
    loaded = CausalLM.load_from_checkpoint(tmp_path / "out" / CHECKPOINT)
    assert torch.equal(loaded.eval()(input_ids=tokens).logits, wanted)

    other = AutoModelForCausalLM.from_pretrained(pretrained)
    other.model.norm.weight.data += 1
    other.save_pretrained(tmp_path / "other")
    assert export(run_dir, tmp_path / "out2", name=str(tmp_path / "other"), adapter=LORA) == 2


def test_the_frozen_base_is_compared_by_digest(pretrained: Path) -> None:
    first, second = built(name=str(pretrained), adapter=LORA), built(name=str(pretrained), adapter=LORA)
    digests = describe(first, None).frozen_digest
    assert len(digests) == sum(not p.requires_grad for p in first.parameters()) > 0
    assert describe(second, None).frozen_digest == digests
    second.model.base_model.model.model.norm.weight.data += 1e-3
    assert sum(describe(second, None).frozen_digest[name] != digest for name, digest in digests.items()) == 1


def test_an_adapter_is_planned_without_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = {"model_type": "llama", "num_attention_heads": 2, **sizes}
    recipe = tmp_path / "recipe.yaml"
    section = {"class_path": "lightning_diloco.hf.CausalLM", "init_args": {"config": config, "adapter": LORA}}
    recipe.write_text(yaml.safe_dump({"model": section}))
    assert main(["plan", str(recipe), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["trainable_parameters"] == 2 * 2 * (2 * 16 + 16 * 2)
    assert figures["parameters"] > 10 * figures["trainable_parameters"]


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"rr": 2}, "adapter.rr: unknown to peft's LoraConfig; did you mean 'r'?"),
        ({"target_module": "all-linear"}, "did you mean 'target_modules'?"),
        ({"peft_type": "LORRA"}, "did you mean 'LORA'?"),
    ],
)
def test_a_misspelt_field_is_refused_with_the_nearest(adapter: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CausalLM(name="somewhere", adapter=adapter)
    assert said in str(caught.value)


def test_unknown_target_modules_are_refused(pretrained: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be put into LlamaForCausalLM"):
        built(name=str(pretrained), adapter={"target_modules": ["no_such_layer"]})


def test_a_missing_peft_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lightning-diloco\[peft\]"):
        CausalLM(name="somewhere", adapter=LORA)
