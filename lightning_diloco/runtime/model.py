"""What a learner tells the run about its model before anything is exchanged. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

TokenUnit = Literal["tokens", "samples"]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model of one learner, as far as others must agree with it.

    Args:
        shapes: shape of every trainable parameter by name; tied weights once.
        mean_names: names in shapes merged by the plain mean: embeddings and heads tied to them.
        frozen_digest: SHA-256 in hex by name, of frozen parameters.
        token_unit: what training steps will count, or None before the first batch has shown it.
        copies: frozen parameters that are copies of trained ones, such as teachers, and these; others may differ.
        built: of the model as it was before a checkpoint was loaded; None: there was none.
    """

    shapes: dict[str, tuple[int, ...]]
    mean_names: frozenset[str]
    frozen_digest: dict[str, str]
    token_unit: TokenUnit | None
    copies: Mapping[str, str] = field(default_factory=dict)
    built: ModelDescription | None = None

    def differing(self, frozen: Mapping[str, str]) -> set[str]:
        """Names of frozen parameters that differ from those of the run, whether or not that matters.

        Args:
            frozen: digests by name, as the run's first learner built it.
        """
        return {
            name
            for name in self.frozen_digest.keys() | frozen.keys()
            if self.frozen_digest.get(name) != frozen.get(name)
        }

    def confirmed(self, frozen: Mapping[str, str]) -> dict[str, str]:
        """What the run is told: digests of frozen parameters, and the run's own where a difference does not matter.

        That is so for copies, and for what was as it should be before a checkpoint was loaded: training may change it.

        Args:
            frozen: see `differing`.
        """
        own = self.copies.keys() | (self.built.copies.keys() if self.built else set())
        built = self.built.frozen_digest if self.built else {}
        return {
            name: frozen[name] if name in frozen and (name in own or built.get(name) == frozen[name]) else digest
            for name, digest in self.frozen_digest.items()
        }
