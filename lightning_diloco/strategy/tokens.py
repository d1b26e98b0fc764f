"""How many tokens a training step saw.

1. Counted on the host batch, before it is moved: asking an accelerator would wait for it.
2. A mapping counts tokens: the sum of its attention mask if that is on the host, else the size of input_ids. Anything
   else counts samples, the batch size. `token_count_fn` overrides both and counts tokens.
3. Micro-batches of one accumulated step add up. One learner counts one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_diloco.errors import ConfigError
from lightning_diloco.runtime.model import TokenUnit

TokenCountFn = Callable[[Any], int]


class TokenCounter:
    """Adds up the batches of one inner step.

    Args:
        count_fn: number of tokens of a host batch; None: rule 2.
    """

    def __init__(self, count_fn: TokenCountFn | None = None) -> None:
        self._count_fn = count_fn
        self._tokens = 0
        self.unit: TokenUnit | None = "tokens" if count_fn else None

    def add(self, batch: Any) -> int:
        """Count one host batch; returns its tokens.

        Raises:
            ConfigError: its size cannot be told, or it counts in another unit than the batches before.
        """
        unit: TokenUnit
        tokens, unit = (int(self._count_fn(batch)), "tokens") if self._count_fn else _count(batch)
        if self.unit not in (None, unit):
            raise ConfigError(
                f"this batch counts {unit}, earlier ones counted {self.unit}: one run counts one unit; "
                "pass token_count_fn to the strategy"
            )
        self.unit = unit
        self._tokens += tokens
        return tokens

    @property
    def has_counted(self) -> bool:
        """Whether anything was counted since `take`."""
        return self._tokens > 0

    def take(self) -> tuple[int, TokenUnit]:
        """What was counted since the last call, and its unit.

        Raises:
            ConfigError: no batch has ever been counted.
        """
        if self.unit is None:
            raise ConfigError(
                "an optimizer step without a counted batch: batches must pass through the Trainer; "
                "use training_step(self, batch, batch_idx) instead of dataloader_iter"
            )
        tokens, self._tokens = self._tokens, 0
        return tokens, self.unit


def _count(batch: Any) -> tuple[int, TokenUnit]:
    if isinstance(batch, Mapping) and isinstance(ids := batch.get("input_ids"), Tensor):
        mask = batch.get("attention_mask")
        on_host = isinstance(mask, Tensor) and mask.device.type == "cpu" and mask.shape == ids.shape
        return int(mask.sum()) if on_host else ids.numel(), "tokens"
    if (size := _batch_size(batch)) is None:
        raise ConfigError(
            f"cannot tell the size of a batch of type {type(batch).__name__}: a tensor, or a mapping or sequence that "
            "holds one, is understood; pass token_count_fn to the strategy"
        )
    return size, "samples"


def _batch_size(batch: Any) -> int | None:
    """Length along dimension 0 of the first tensor found; the length of a sequence without any."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, Mapping):
        return next((size for value in batch.values() if (size := _batch_size(value)) is not None), None)
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        sizes = (size for value in batch if (size := _batch_size(value)) is not None)
        return next(sizes, len(batch))
    return None
