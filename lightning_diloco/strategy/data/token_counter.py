"""Counts the tokens of a training step.

1. The batch is counted on the host before it is moved, because reading a value from an accelerator would wait for it.
2. A mapping with input_ids counts tokens: the sum of its attention mask if that is on the host, of a bool or integer
   dtype, and not zero; else the size of input_ids. Masks of floats are added to attention scores. Any other batch
   counts samples. Their number is found almost as Lightning finds it for `self.log`; empty tensors are passed over. A
   batch without a size counts as one sample, with a warning. `token_count_fn` replaces all of this and counts tokens.
3. A batch counts at least one token, because the syncer gives no weight to work without tokens.
4. The micro-batches of an accumulated step add up. All batches of a learner count the same unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_diloco.errors import ConfigError
from lightning_diloco.manifest import TokenUnit

if TYPE_CHECKING:
    import lightning.pytorch as pl

_TAKES_ITERATOR = (
    "training_step(self, dataloader_iter) takes its batches itself, so they cannot be counted; use "
    "training_step(self, batch, batch_idx)"
)

TokenCountFn = Callable[[Any], int]


def check_training_step(module: pl.LightningModule) -> None:
    """Check that batches can be counted.

    Raises:
        ConfigError: batches would not pass through the Trainer.
    """
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigError(_TAKES_ITERATOR)


class TokenCounter:
    """Adds up the batches of one inner step.

    Args:
        count_fn: returns the number of tokens of a host batch; None: rule 2.
    """

    def __init__(self, count_fn: TokenCountFn | None = None) -> None:
        self._count_fn = count_fn
        self._tokens = 0
        self._has_warned = False
        self.unit: TokenUnit | None = "tokens" if count_fn else None

    def add(self, batch: Any) -> int:
        """Count one host batch and return its tokens; 0 for None, which Lightning skips.

        Raises:
            ConfigError: it counts in another unit than the batches before, or the user's count is no number of
                tokens.
        """
        if batch is None:
            return 0
        unit: TokenUnit
        tokens, unit = (_counted(self._count_fn, batch), "tokens") if self._count_fn else self._count(batch)
        if self.unit not in (None, unit):
            raise ConfigError(
                f"this batch counts {unit}, earlier ones counted {self.unit}: one run counts one unit; "
                "pass token_count_fn to the strategy"
            )
        self.unit = unit
        tokens = max(1, tokens)
        self._tokens += tokens
        return tokens

    @property
    def has_counted(self) -> bool:
        """Whether any tokens were counted since `take`."""
        return self._tokens > 0

    def _count(self, batch: Any) -> tuple[int, TokenUnit]:
        if isinstance(batch, Mapping) and isinstance(ids := batch.get("input_ids"), Tensor):
            mask = batch.get("attention_mask")
            on_host = isinstance(mask, Tensor) and mask.device.type == "cpu" and mask.shape == ids.shape
            is_mask = on_host and not (mask.is_floating_point() or mask.is_complex())
            visible = int(mask.sum()) if is_mask else 0
            return visible if visible > 0 else ids.numel(), "tokens"
        if (size := _batch_size(batch)) is None:
            size = 1
            if not self._has_warned:
                rank_zero_warn(
                    f"A batch of type {type(batch).__name__} has no size that can be found: each counts as one sample "
                    "in the weights of the learners. Pass token_count_fn to the strategy to count otherwise."
                )
            self._has_warned = True
        return size, "samples"

    def take(self) -> tuple[int, TokenUnit]:
        """Return what was counted since the last call, and its unit.

        Raises:
            ConfigError: no batch has ever been counted.
        """
        if self.unit is None:
            raise ConfigError(
                "an optimizer step without a counted batch: at least one must have passed through the Trainer; "
                "use training_step(self, batch, batch_idx)"
            )
        tokens, self._tokens = self._tokens, 0
        return tokens, self.unit


def _counted(count_fn: TokenCountFn, batch: Any) -> int:
    count = count_fn(batch)
    if not 0 <= count < inf:
        raise ConfigError(
            f"token_count_fn returned {count}: it must return the number of tokens of a batch, finite and at least 0; "
            "correct the function, or leave it out"
        )
    return int(count)


def _batch_size(batch: Any) -> int | None:
    """Return the length of the first tensor or array along dimension 0; else of the first innermost sequence."""
    size = _first_size(batch)
    return _first_length(batch) if size is None else size


def _first_size(batch: Any) -> int | None:
    if isinstance(batch, Tensor) or isinstance(getattr(batch, "shape", None), tuple):
        if not batch.shape:
            return 1
        return int(batch.shape[0]) or None  # an empty tensor says nothing
    return next((size for part in _parts(batch) if (size := _first_size(part)) is not None), None)


def _first_length(batch: Any) -> int | None:
    within = next((size for part in _parts(batch) if (size := _first_length(part)) is not None), None)
    is_sequence = isinstance(batch, Sequence) and not isinstance(batch, (str, bytes))
    return len(batch) if within is None and is_sequence else within


def _parts(batch: Any) -> Iterable[Any]:
    if isinstance(batch, (str, bytes, Iterator)):
        return ()
    if isinstance(batch, Mapping):
        return batch.values()
    if is_dataclass(batch):
        return [getattr(batch, field.name) for field in fields(batch)]
    return batch if isinstance(batch, Iterable) else ()
