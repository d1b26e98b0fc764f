"""All options, their defaults and their checks.

1. `RunConfig` holds the options that a run shares. The manifest fixes them once. Each value comes from the syncer's
   flags, else from the seeding learner's explicit options, else from the defaults here.
2. `LearnerConfig` holds the options that each learner sets for itself.
3. Values are not coerced, and bad values do not fall back to defaults. `problems()` names every bad value and what is
   allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_diloco.errors import ConfigError

Merge = Literal["rda", "mean", "trimmed_mean", "median"]
Guard = Literal["direction", "norm"]
Wire = Literal["int8", "int4", "bf16", "fp32"]
Align = Literal["carry", "overwrite", "blend"]
Evaluate = Literal["anchor", "local"]
AnchorDevice = Literal["device", "host"]
Grace = Literal["adaptive"] | float

PROTOCOL_VERSION = 2
CHAIN_LENGTH = 3
"""A learner that is more versions behind gets the full published values instead of the missing updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Options that all learners and the syncer of a run share.

    Args:
        sync_every: H, inner steps between two exchanges of the same fragment, >= 1. Paper: 24.
        num_fragments: P, 1..sync_every. None: min(24, sync_every), or fewer if the model has fewer slices.
        overlap: tau, steps between snapshot and expected landing, 1..num_fragments. Paper: 2. The default is lower with
            fewer fragments.
        quorum: K, contributions that a round needs; lowered to the number of learners stepping. Paper: 1.
        grace: time that a round with quorum waits for more contributions, in seconds, or "adaptive" (Eq. 3 of the
            paper).
        merge: "mean", or "rda" for the paper's radial-directional averaging (App. D.2) of all but embeddings. The mean
            sums contributions, so the anchor does not depend on which of them share a round. "rda" makes longer steps
            with more learners in a round.
            "trimmed_mean" and "median" are taken per coordinate of all but embeddings. They bound what a minority of
            learners can move. They weight all contributions equally, and use the mean in rounds with fewer than 3.
        guard: how broken learners are detected, whose contributions are then not merged: by "direction" and norm, or by
            "norm" alone. Choose "norm" if learners have data of different kinds, because their contributions may point
            in different directions although no learner is broken.
        outer_lr: outer learning rate, > 0, or "auto": it follows the correlation of successive outer gradients, between
            1 - mu and 1 - 0.3 mu; see `core/outer_lr.py`. The paper publishes none.
        outer_momentum: Nesterov coefficient, 0 <= mu < 1. Default: 0.6 with periods of 24 steps and more, smaller with
            shorter periods.
        wire: precision of values on the wire, in both directions.
        block_size: elements that share one quantization scale, a power of two, 16..4096.
        max_staleness_versions: largest staleness of a contribution that missed its round, >= 1. When the next round
            opens, contributions with a higher one are superseded.
        max_slice_numel: largest slice of a parameter, in elements.
        lease_s: silence in seconds after which a learner lapses.
        data_parts: number of parts of the data; None for no agreed split.
    """

    sync_every: int = 24
    num_fragments: int | None = None
    overlap: int = 2
    quorum: int = 1
    grace: Grace = "adaptive"
    merge: Merge = "mean"
    guard: Guard = "direction"
    outer_lr: Literal["auto"] | float = "auto"
    outer_momentum: float = 0.6
    wire: Wire = "int8"
    block_size: int = 256
    max_staleness_versions: int = 4
    max_slice_numel: int = 1 << 24
    lease_s: float = 15.0
    data_parts: int | None = None

    @property
    def fragments_wanted(self) -> int:
        """Requested number of fragments; the model may limit it."""
        return min(24, self.sync_every) if self.num_fragments is None else self.num_fragments

    def problems(self) -> list[str]:
        """Return one sentence per bad value; empty if all are valid."""
        found = _Problems(self)
        found.integer("sync_every", 1)
        found.integer("quorum", 1)
        found.integer("max_staleness_versions", 1)
        found.integer("max_slice_numel", 1)
        found.integer("num_fragments", 1, optional=True)
        found.integer("data_parts", 1, optional=True)
        found.integer("overlap", 1)
        if self.outer_lr != "auto":
            found.number("outer_lr", above=0.0, or_else='"auto"')
        found.number("outer_momentum", at_least=0.0, below=1.0)
        found.number("lease_s", above=0.0)
        found.choice("merge", Merge)
        found.choice("guard", Guard)
        found.choice("wire", Wire)
        if self.grace != "adaptive":
            found.number("grace", at_least=0.0, or_else='"adaptive"')
        if not _is_int(self.block_size) or self.block_size not in _BLOCK_SIZES:
            found.add("block_size", f"one of {', '.join(map(str, _BLOCK_SIZES))}")
        if not found.sentences:
            if self.fragments_wanted > self.sync_every:
                found.add("num_fragments", f"at most sync_every={self.sync_every}: one fragment is due per step")
            if self.overlap > self.fragments_wanted:
                found.add("overlap", f"at most the number of fragments, {self.fragments_wanted}")
        return found.sentences

    def validate(self) -> RunConfig:
        """Return self, or raise one `ConfigError` with every problem."""
        if problems := self.problems():
            raise ConfigError(problems)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for manifests and messages."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Build a config from `to_dict` output; unknown keys and bad values raise `ConfigError`."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError([f"unknown run option {name!r}; known: {', '.join(sorted(known))}" for name in unknown])
        return cls.with_defaults(values).validate()

    @classmethod
    def with_defaults(cls, values: Mapping[str, Any]) -> RunConfig:
        """Build a config from these options and matching defaults for the others, without validation.

        Unless they are given,

            overlap = at most num_fragments
            outer_momentum = 0.6 * min(1, sync_every / 24)

        The shorter the period, the more successive outer gradients are alike: their correlation is about 0.4 with H =
        24 and 0.7 with H = 6. Momentum then only makes the outer step longer. Source: our choice, see
        tests/bench/quality.py.
        """
        config = cls(**values)
        if not (_is_int(config.sync_every) and (config.num_fragments is None or _is_int(config.num_fragments))):
            return config
        if "overlap" not in values and config.fragments_wanted >= 1:
            config = dataclasses.replace(config, overlap=min(config.overlap, config.fragments_wanted))
        if "outer_momentum" not in values and config.sync_every >= 1:
            config = dataclasses.replace(config, outer_momentum=0.6 * min(1.0, config.sync_every / 24))
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """Options that each learner sets for itself.

    Args:
        align: treatment of steps trained while a round was in flight: "carry" keeps them, "overwrite" drops them (the
            paper), "blend" mixes (Streaming DiLoCo).
        blend_alpha: weight of the local value under "blend", 0..1.
        error_feedback: keep the quantization error for the next contribution.
        evaluate: validate the "anchor" (the run's model) or the "local" parameters.
        anchor_device: placement of the anchors, 4 bytes per parameter: with the parameters ("device", fastest) or in
            "host" memory, from which each is copied just in time (XLA). On CPU both are the same; CUDA does not support
            "host".
        join: join string of a run; None: DILOCO_JOIN, else an embedded syncer.
        learner: learner id; None: DILOCO_LEARNER, else the host name and a slot.
        drain_s: seconds to wait at the end until the last contributions are merged. None: as long as they make
            progress, each within three times the usual time of a round, or a minute; if the syncer cannot be reached,
            ten minutes.
        max_fleet_tokens: token budget of the whole fleet, after which the run ends; None for no budget.
        checkpoint_every: inner steps between two checkpoints from which this learner can restart; 0 for none.
        checkpoint_store: folder or fsspec URL of the checkpoints of all learners; None: in the run directory.
        preemption_s: seconds after SIGTERM within which the process leaves, writes a checkpoint and exits.
    """

    align: Align = "carry"
    blend_alpha: float = 0.5
    error_feedback: bool = True
    evaluate: Evaluate = "anchor"
    anchor_device: AnchorDevice = "device"
    join: str | None = None
    learner: str | None = None
    drain_s: float | None = None
    max_fleet_tokens: int | None = None
    checkpoint_every: int = 100
    checkpoint_store: str | None = None
    preemption_s: float = 20.0

    def problems(self) -> list[str]:
        """Return one sentence per bad value; empty if all are valid."""
        found = _Problems(self)
        found.choice("align", Align)
        found.choice("evaluate", Evaluate)
        found.choice("anchor_device", AnchorDevice)
        found.number("blend_alpha", at_least=0.0, at_most=1.0)
        if self.drain_s is not None:
            found.number("drain_s", at_least=0.0, or_else="None")
        found.integer("max_fleet_tokens", 1, optional=True)
        found.integer("checkpoint_every", 0)
        found.number("preemption_s", above=0.0)
        if not isinstance(self.error_feedback, bool):
            found.add("error_feedback", "True or False")
        if self.align == "carry" and not self.error_feedback:
            found.add("error_feedback", 'True with align="carry", which keeps unsent progress in the parameters')
        if self.learner is not None and not is_learner_id(self.learner):
            found.add("learner", "1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")
        return found.sentences


def is_learner_id(name: object) -> bool:
    """Whether this is a valid learner id, which becomes part of paths and run names."""
    return (
        isinstance(name, str)
        and 1 <= len(name) <= 64
        and name.isascii()
        and name[0].isalnum()
        and all(c.isalnum() or c in "._-" for c in name)
    )


_BLOCK_SIZES = tuple(2**k for k in range(4, 13))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Problems:
    """Collects sentences about the fields of one config."""

    def __init__(self, config: RunConfig | LearnerConfig) -> None:
        self._config = config
        self.sentences: list[str] = []

    def add(self, name: str, allowed: str) -> None:
        self.sentences.append(f"{name}={getattr(self._config, name)!r}: must be {allowed}")

    def integer(self, name: str, minimum: int, *, optional: bool = False) -> None:
        value = getattr(self._config, name)
        if optional and value is None:
            return
        if not _is_int(value) or value < minimum:
            self.add(name, f"an integer of at least {minimum}" + (", or None" if optional else ""))

    def choice(self, name: str, allowed: Any) -> None:
        if getattr(self._config, name) not in get_args(allowed):
            self.add(name, "one of " + ", ".join(map(repr, get_args(allowed))))

    def number(
        self,
        name: str,
        *,
        above: float | None = None,
        at_least: float | None = None,
        below: float | None = None,
        at_most: float | None = None,
        or_else: str | None = None,
    ) -> None:
        value = getattr(self._config, name)
        bounds = [(above, "above"), (at_least, "at least"), (below, "below"), (at_most, "at most")]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value - value == 0
        if is_number and all(
            (
                above is None or value > above,
                at_least is None or value >= at_least,
                below is None or value < below,
                at_most is None or value <= at_most,
            )
        ):
            return
        said = " and ".join(f"{word} {bound:g}" for bound, word in bounds if bound is not None)
        self.add(name, f"a finite number {said}" + (f", or {or_else}" if or_else else ""))
