"""What a learner tells the run about its model before anything is exchanged. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TokenUnit = Literal["tokens", "samples"]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model of one learner, as far as others must agree with it.

    Args:
        shapes: shape of every trainable parameter by name; tied weights once.
        mean_names: names in shapes merged by the plain mean: embeddings and heads tied to them.
        frozen_digest: SHA-256 in hex by name, of frozen parameters and persistent buffers.
        token_unit: what training steps will count, or None before the first batch has shown it.
    """

    shapes: dict[str, tuple[int, ...]]
    mean_names: frozenset[str]
    frozen_digest: dict[str, str]
    token_unit: TokenUnit | None
