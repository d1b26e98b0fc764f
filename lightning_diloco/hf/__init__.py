"""Hugging Face models and text as Lightning modules."""

from lightning_diloco.hf.causal_lm import CausalLM
from lightning_diloco.hf.text_data import TextData

__all__ = ["CausalLM", "TextData"]
