"""Finds the families of transformers that are language models: each position predicts the next token, and sees no later
one.

1. `AutoModelForCausalLM` also builds models that see the token that they must predict, and models that do not shift
   their labels. Both reach a loss of almost zero, because they learn to copy their input.
2. The rule reads the config and the registries of transformers. It needs neither weights nor a forward.
"""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from lightning_diloco.errors import ConfigError

_ENCODERS = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation"}  # causal only with is_decoder
_OTHERS = {*MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "cpmant", "trocr", "whisper", "xlm", "xlnet"}


def check_causal(config: PreTrainedConfig) -> None:
    """Check that the model of a config predicts the next token from those before it.

    Raises:
        ConfigError: the model sees the token that it must predict, or does not shift its labels.
    """
    kind = config.model_type
    if kind in _OTHERS:
        raise ConfigError(
            f"model_type={kind!r}: must be a decoder-only language model, which predicts the next token and shifts its "
            "labels; choose one, such as 'llama' or 'gpt2'"
        )
    if kind in _ENCODERS and not getattr(config, "is_decoder", False):
        raise ConfigError(
            f"model_type={kind!r} with is_decoder=False sees the token that it must predict; must be a decoder: set "
            "is_decoder: true in the model's config, or choose a decoder-only model, such as 'llama' or 'gpt2'"
        )
