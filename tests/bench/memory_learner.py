"""A learner of a recipe, as `diloco run` starts one, that records its memory before it creates anything of the recipe.

python -m tests.bench.memory_learner ARGUMENTS     arguments are those of lightning_diloco.cli.fit

At that point all imports are done, and the kernel's peak counter is reset. The record is the file `before` in the
learner's folder, in bytes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import datasets  # noqa: F401
import tokenizers  # noqa: F401
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_diloco.cli import fit, fitting
from tests.resident import forget_peak, resident_now


def warm_up() -> None:
    """Load what the first step of any model loads: threads, kernels and their code."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


class NotingFit(fitting.Fit):
    """Fits the recipe and records memory."""

    def before_instantiate_classes(self) -> None:
        """Record memory before anything is created."""
        super().before_instantiate_classes()
        warm_up()
        folder = Path(os.environ["DILOCO_RUN_DIR"]) / "learners" / os.environ["DILOCO_LEARNER"]
        forget_peak()
        (folder / "before").write_text(str(resident_now(os.getpid())))


if __name__ == "__main__":
    fitting.Fit = NotingFit  # type: ignore[misc]
    sys.exit(fit.main())
