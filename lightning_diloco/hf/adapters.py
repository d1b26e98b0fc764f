"""PEFT adapters, such as LoRA: a few trained parameters next to a frozen model.

1. Learners exchange only parameters that require a gradient. The join compares the frozen base by digest.
2. An adapter is given as the fields of its PEFT config. The default `peft_type` is "LORA".
3. PEFT is an optional dependency and imported only for adapters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_diloco.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

DEFAULT_TYPE = "LORA"


def problems(adapter: Mapping[str, Any]) -> list[str]:
    """Return one sentence per field that PEFT would refuse."""
    try:
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING as CONFIGS
    except ImportError:
        return ["adapter: needs peft, which is not installed; run pip install 'lightning-diloco[peft]'"]
    types = sorted(kind.value for kind in CONFIGS)
    wanted = adapter.get("peft_type", DEFAULT_TYPE)
    if wanted not in types:
        return [f"adapter.peft_type={wanted!r}: must be a PEFT type; {_nearest(str(wanted), types)}"]
    known = [field.name for field in dataclasses.fields(CONFIGS[wanted])]
    return [
        f"adapter.{name}: unknown to peft's {CONFIGS[wanted].__name__}; {_nearest(name, known)}"
        for name in adapter
        if name not in known
    ]


def add_adapter(model: PreTrainedModel, adapter: Mapping[str, Any]) -> PeftModel:
    """Freeze a causal language model and add an adapter, in place.

    Args:
        model: any causal language model.
        adapter: fields of a PEFT config.

    Raises:
        ConfigError: peft refuses the fields; the message includes the reason.
    """
    from peft import get_peft_config, get_peft_model

    try:
        config = get_peft_config({"peft_type": DEFAULT_TYPE, "task_type": "CAUSAL_LM", **adapter})
        return get_peft_model(model, config)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"adapter={dict(adapter)!r} cannot be put into {type(model).__name__}: {error}; correct its fields, "
            "such as {'r': 8, 'target_modules': 'all-linear'}"
        ) from error


def _nearest(name: str, known: list[str]) -> str:
    return did_you_mean(name, known) or f"known: {', '.join(known)}"
