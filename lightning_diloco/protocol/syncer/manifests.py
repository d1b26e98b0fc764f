"""Checks a seeder's manifest before anything is computed from it.

1. A manifest must have exactly the fields of `make_manifest`, of their types and within their bounds (`limits.py`).
2. Its plan must be computable within seconds, so slices and fragments are bounded. When the start values have arrived,
   the plan is computed and compared with the digest and the values.
"""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta, field

from lightning_diloco.config import RunConfig
from lightning_diloco.errors import ConfigError, CorruptMessageError
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.codec import Json, Value
from lightning_diloco.protocol.limits import MAX_NAMES, Count, Int64, Named, Options, Text

MAX_FRAGMENTS = 4096
MAX_SLICES = 1 << 18
MAX_DEALING = 50_000_000
MAX_DIMENSIONS = 64


class _Manifest(Value, frozen=True):
    """Fields of a manifest. The protocol needs the fields without a default; the plan needs the others too."""

    config: Options
    frozen: Named
    token_unit: Text | None
    plan_digest: Text
    num_fragments: Count
    data_seed: Int64 = 0
    asked: Options = field(default_factory=dict)
    shapes: Annotated[dict[Text, tuple[Int64, ...]], Meta(max_length=MAX_NAMES)] = field(default_factory=dict)
    mean_names: Annotated[tuple[Text, ...], Meta(max_length=MAX_NAMES)] = ()


def defect(manifest: Json) -> str | None:
    """Return what is wrong with a seeder's manifest; None if nothing is."""
    try:
        read = codec.load(_Manifest, manifest, "manifest")
    except CorruptMessageError as error:
        return str(error)
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
