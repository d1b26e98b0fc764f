"""Checks a seeder's manifest before anything is computed from it.

1. It must have exactly the fields of `make_manifest`, of their types (`codec`) and within the bounds of `limits`.
2. Its plan must be computable within seconds, so slices and fragments are bounded. When the start values are there, the
   plan is computed and compared with the digest and the values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_diloco.config import RunConfig
from lightning_diloco.errors import ConfigError, CorruptMessageError
from lightning_diloco.protocol import codec, limits
from lightning_diloco.protocol.codec import Json
from lightning_diloco.protocol.messages import Scalar

MAX_FRAGMENTS = 4096
MAX_SLICES = 1 << 18
MAX_DEALING = 50_000_000
MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class _Manifest:
    """Fields of a manifest. The protocol needs those without a default; computing the plan needs the others too."""

    config: dict[str, Scalar]
    frozen: dict[str, str]
    token_unit: str | None
    plan_digest: str
    num_fragments: int
    data_seed: int = 0
    asked: dict[str, Scalar] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    mean_names: tuple[str, ...] = ()


def defect(manifest: Json) -> str | None:
    """Return what is wrong with a seeder's manifest; None if nothing is."""
    try:
        read = codec.load(_Manifest, manifest, "manifest")
    except CorruptMessageError as error:
        return f"{error}; do both sides run the same version?"
    if problem := limits.objection(read):
        return f"manifest: {problem}"
    try:
        config = RunConfig.from_dict(read.config)
    except (ConfigError, TypeError) as error:
        return str(error)
    if read.num_fragments != config.fragments_wanted:
        return f"num_fragments={read.num_fragments}, the config says {config.fragments_wanted}"
    if read.token_unit not in (None, "tokens", "samples"):
        return f"token_unit={read.token_unit!r}; must be 'tokens' or 'samples'"
    return _excess(read.shapes, config)


def _excess(shapes: dict[str, tuple[int, ...]], config: RunConfig) -> str | None:
    """Return why the plan would take too long to compute; None if it would not."""
    if bad := [name for name, shape in shapes.items() if min(shape, default=1) < 1 or len(shape) > MAX_DIMENSIONS]:
        return f"parameter {bad[0]!r}: must have at most {MAX_DIMENSIONS} dimensions, each at least 1"
    if config.fragments_wanted > MAX_FRAGMENTS:
        return f"num_fragments={config.fragments_wanted}: must be at most {MAX_FRAGMENTS}"
    num_slices = sum(_most_slices(shape, config.max_slice_numel) for shape in shapes.values())
    if num_slices > MAX_SLICES:
        return (
            f"max_slice_numel={config.max_slice_numel} cuts this model into about {num_slices} slices: must be at most "
            f"{MAX_SLICES}; choose a larger max_slice_numel"
        )
    num_shapes = len({shape[1:] for shape in shapes.values()})
    if num_shapes * config.fragments_wanted**2 > MAX_DEALING:
        return (
            f"num_fragments={config.fragments_wanted} with {num_shapes} kinds of rows: fragments squared times kinds "
            f"must be at most {MAX_DEALING}; choose fewer fragments"
        )
    return None


def _most_slices(shape: tuple[int, ...], max_slice_numel: int) -> int:
    rows = shape[0] if shape else 1
    return min(rows, 2 * -(-math.prod(shape) // max_slice_numel))
