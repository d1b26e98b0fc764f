"""`CausalLM` trains only models whose logits do not depend on later tokens, and that shift their labels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig

from lightning_diloco.errors import ConfigError
from lightning_diloco.hf import CausalLM
from lightning_diloco.hf.export import _save_transformers

IDS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SIZES = {**IDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
BART = {**IDS, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
DECODER_ONLY = [
    "gemma", "gemma2", "gemma3_text", "glm", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3",
]  # fmt: skip
ENCODERS = ["bert", "bert-generation", "electra", "roberta", "xlm-roberta"]


def _built(config: dict[str, Any]) -> CausalLM:
    model = CausalLM(config=config)
    model.configure_model()
    return model


@pytest.mark.parametrize(
    "config",
    [{"model_type": kind, **SIZES, "num_key_value_heads": 1, "head_dim": 8} for kind in DECODER_ONLY]
    + [{"model_type": kind, **SIZES, "is_decoder": True} for kind in ENCODERS]
    + [{"model_type": "gpt_neox", **SIZES}, {"model_type": "gpt2", **IDS, "n_embd": 16, "n_layer": 1, "n_head": 2}],
    ids=lambda config: config["model_type"],
)
def test_an_accepted_model_sees_no_later_token_and_shifts_its_labels(config: dict[str, Any]) -> None:
    model = _built(config).eval()
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    other_end = tokens.clone()
    other_end[:, -1] = (other_end[:, -1] + 1) % 64
    with torch.no_grad():
        output, other = model(input_ids=tokens, labels=tokens), model(input_ids=other_end)
    torch.testing.assert_close(output.logits[:, :-1], other.logits[:, :-1], rtol=0, atol=1e-6)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    aux = getattr(output, "aux_loss", None)
    balancing = 0.0 if aux is None else model.model.router_aux_loss_coef * aux
    torch.testing.assert_close(output.loss, expected + balancing)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_a_mixture_of_experts_trains_with_its_balancing_term_and_is_exported_without(kind: str, tmp_path: Path) -> None:
    config = {"model_type": kind, **SIZES, "num_key_value_heads": 1}
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    model = _built(config)
    output = model(input_ids=tokens, labels=tokens)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert model.model.router_aux_loss_coef * output.aux_loss > 1e-4
    torch.testing.assert_close(output.loss, expected + model.model.router_aux_loss_coef * output.aux_loss)
    _save_transformers(model.model, None, tmp_path)
    assert not AutoConfig.from_pretrained(tmp_path).output_router_logits

    assert _built({**config, "output_router_logits": False})(input_ids=tokens, labels=tokens).aux_loss is None


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_is_refused_with_the_option_that_makes_it_a_decoder(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"model_type='{kind}' with is_decoder=False .* set is_decoder: true"):
        _built({"model_type": kind, **SIZES})


@pytest.mark.parametrize("kind", ["bart", "mbart", "mvp", "trocr"])
def test_a_model_that_does_not_shift_its_labels_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"model_type='{kind}': must be a decoder-only language model"):
        _built({"model_type": kind, **BART})
