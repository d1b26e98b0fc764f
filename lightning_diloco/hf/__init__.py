"""Lightning modules and data modules for Hugging Face models and text."""

from lightning_diloco.hf.causal_lm import CausalLM
from lightning_diloco.hf.text_data import TextData

__all__ = ["CausalLM", "TextData"]
