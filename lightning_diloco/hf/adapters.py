"""Adapters of PEFT, such as LoRA: a few parameters that are trained beside a model that stays as it is.

1. Only what requires a gradient is exchanged between learners; the frozen base is compared by digest when they join.
2. An adapter is given as the fields of its PEFT configuration; `peft_type` is "LORA" unless it says otherwise.
3. PEFT is an extra, and imported only for this.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_diloco.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

DEFAULT_TYPE = "LORA"


def problems(adapter: Mapping[str, Any]) -> list[str]:
    """One sentence for each field that PEFT would not take."""
    try:
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING as CONFIGS
    except ImportError:
        return ["adapter: needs peft, which is not installed; pip install 'lightning-diloco[peft]'"]
    types = sorted(kind.value for kind in CONFIGS)
    wanted = adapter.get("peft_type", DEFAULT_TYPE)
    if wanted not in types:
        return [f"adapter.peft_type={wanted!r}: must be a type of peft; {_nearest(str(wanted), types)}"]
    known = [field.name for field in dataclasses.fields(CONFIGS[wanted])]
    return [
        f"adapter.{name}: unknown to peft's {CONFIGS[wanted].__name__}; {_nearest(name, known)}"
        for name in adapter
        if name not in known
    ]


def add_adapter(model: PreTrainedModel, adapter: Mapping[str, Any]) -> PeftModel:
    """Freeze a causal language model and put an adapter into it, in place.

    Args:
        model: any.
        adapter: fields of a PEFT configuration.

    Raises:
        ConfigError: peft refuses them, with what it said.
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
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
