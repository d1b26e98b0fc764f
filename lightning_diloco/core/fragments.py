"""How a model is cut into fragments, as a pure function of names, shapes and two numbers.

1. A slice is a row range of one parameter (row: index along dimension 0; a scalar has one row). Every element of the
   model lies in exactly one slice, every slice in exactly one fragment, and no fragment is empty.
2. No slice is larger than max_slice_numel, nor than an even share of the model (or a half, quarter or eighth of one,
   if the fragments come out uneven otherwise), as far as whole rows allow. What must be cut is cut into equal pieces if
   up to twice the needed number allows it, else into pieces one row apart.
3. Fragments are filled greedily, largest slice first into the lightest fragment, but equal-shaped slices are dealt out
   to whole groups of fragments at once. Fragments of one group have the same shape signature, and every distinct
   signature costs an accelerator one more compilation. The group size with the fewest signatures wins. Two slices of
   one parameter in a fragment would be told from slices of two parameters: a parameter's slices are spread.
4. Peak <= mean + one slice, because a slice only ever goes to a lightest fragment.

Source: balanced tensor fragmentation of arXiv 2604.21428; slices and equal signatures are our choice.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, prod

from lightning_diloco.core.layout import Entry, FragmentLayout, Shape, Slice, gather, gather_slice, scatter
from lightning_diloco.errors import ConfigError

__all__ = ["Entry", "FragmentLayout", "FragmentPlan", "Shape", "Slice", "gather", "gather_slice", "scatter"]

# Slices are at most this part of an even share: the first that keeps the peak within reach of the mean. Our choice.
_FINENESSES = (1, 2, 4, 8)
_WANTED_PEAK = 1.1

# A plan may be this much heavier at its peak than the most balanced one if it saves signatures. Our choice.
_TOLERATED_PEAK = 1.05


@dataclass(frozen=True)
class FragmentPlan:
    """Which slices of which parameters are synchronized together.

    Args:
        shapes: full shape of every parameter, sorted by name.
        fragments: the slices of each fragment, in the order they have in its flat vector.
        mean_names: parameters merged by the plain weighted mean: embeddings and heads tied to them.
    """

    shapes: dict[str, Shape]
    fragments: tuple[tuple[Slice, ...], ...]
    mean_names: frozenset[str]

    @classmethod
    def balanced(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        num_fragments: int,
        max_slice_numel: int,
        mean_names: Collection[str] = (),
    ) -> FragmentPlan:
        """Cut a model into fragments of nearly equal size and few distinct shape signatures.

        Args:
            shapes: shape by parameter name, in any order; de-duplicated, so that tied weights appear once.
            num_fragments: P, >= 1; fewer are made if the model has fewer slices.
            max_slice_numel: largest slice in elements, >= 1; a single row may exceed it.
            mean_names: names in shapes that are merged by the plain mean.

        Raises:
            ConfigError: no parameters, empty parameters, unknown mean_names, or numbers below 1; all at once.
        """
        if problems := _problems(shapes, num_fragments, max_slice_numel, mean_names):
            raise ConfigError(problems)
        ordered = {name: tuple(shapes[name]) for name in sorted(shapes)}
        share = sum(map(prod, ordered.values())) / num_fragments
        for fineness in _FINENESSES:
            largest = min(max_slice_numel, ceil(share / fineness))
            by_shape = _slices_by_shape(ordered, largest)
            counts = {shape: len(by_shape[shape]) for shape in sorted(by_shape, key=lambda s: (-prod(s), s))}
            signatures = _deal(counts, min(num_fragments, sum(counts.values())))
            if _peak(signatures) <= _WANTED_PEAK * share:
                break
        return cls(ordered, _fill(signatures, by_shape, ordered), frozenset(mean_names))

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex of shapes, fragments and mean_names as canonical JSON; parties compare it when they meet."""
        fragments = [[[s.name, s.start_row, s.stop_row] for s in fragment] for fragment in self.fragments]
        content = {"shapes": self.shapes, "fragments": fragments, "mean_names": sorted(self.mean_names)}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    @property
    def num_fragments(self) -> int:
        """P, the number of fragments actually made."""
        return len(self.fragments)

    def numel(self, p: int) -> int:
        """Number of elements of fragment p, without padding."""
        return sum(prod(self.slice_shape(s)) for s in self.fragments[p])

    def slice_shape(self, s: Slice) -> Shape:
        """Shape of a slice: that of its parameter with fewer rows; () for a scalar."""
        return _slice_shape(self.shapes[s.name], s)

    def signatures(self) -> tuple[tuple[Shape, ...], ...]:
        """The distinct lists of slice shapes among the fragments, in order of first appearance."""
        return tuple(dict.fromkeys(tuple(map(self.slice_shape, fragment)) for fragment in self.fragments))

    def layout(self, p: int, block_size: int) -> FragmentLayout:
        """The flat vector of fragment p; each slice starts at a multiple of block_size elements."""
        entries, offset = [], 0
        for s in self.fragments[p]:
            shape = self.slice_shape(s)
            numel = prod(shape)
            entries.append(Entry(s, shape, offset, numel, "mean" if s.name in self.mean_names else "rda"))
            offset += -(-numel // block_size) * block_size
        return FragmentLayout(tuple(entries), numel=self.numel(p), padded_numel=offset)


def _problems(
    shapes: Mapping[str, tuple[int, ...]], num_fragments: int, max_slice_numel: int, mean_names: Collection[str]
) -> list[str]:
    found = []
    if not shapes:
        found.append("found no parameters: a plan needs at least one; pass the model's trainable named_parameters()")
    found += [
        f"parameter {name!r} has shape {tuple(shape)}: every dimension must be at least 1; "
        "remove the empty parameter, or materialize a lazy one first"
        for name, shape in shapes.items()
        if any(size < 1 for size in shape)
    ]
    found += [
        f"mean_names holds {name!r}: it must name a parameter of the plan; use the name that named_parameters() gives"
        for name in sorted(set(mean_names) - set(shapes))
    ]
    for label, value in (("num_fragments", num_fragments), ("max_slice_numel", max_slice_numel)):
        if value < 1:
            found.append(f"{label}={value}: must be at least 1; leave it at its default if unsure")
    return found


def _slice_shape(shape: Shape, s: Slice) -> Shape:
    return (s.stop_row - s.start_row, *shape[1:]) if shape else ()


def _slices_by_shape(shapes: Mapping[str, Shape], largest: int) -> dict[Shape, list[Slice]]:
    found: defaultdict[Shape, list[Slice]] = defaultdict(list)
    for name, shape in shapes.items():
        for piece in _cut(name, shape, largest):
            found[_slice_shape(shape, piece)].append(piece)
    return found


def _peak(signatures: list[list[Shape]]) -> int:
    return max(sum(map(prod, signature)) for signature in signatures)


def _cut(name: str, shape: Shape, largest: int) -> list[Slice]:
    """Cut one parameter into row ranges of at most `largest` elements, or single rows."""
    rows = shape[0] if shape else 1
    needed = -(-rows // max(1, largest // prod(shape[1:])))
    pieces = next((k for k in range(needed, min(2 * needed, rows) + 1) if rows % k == 0), needed)
    bounds = [rows * k // pieces for k in range(pieces + 1)]
    return [Slice(name, start, stop) for start, stop in pairwise(bounds)]


def _fill(
    signatures: list[list[Shape]], by_shape: Mapping[Shape, list[Slice]], shapes: Mapping[str, Shape]
) -> tuple[tuple[Slice, ...], ...]:
    """Give every fragment its slices: those of a shape one to each in turn, which spreads a parameter's (rule 3)."""
    fragments = [list[Slice]() for _ in signatures]
    for shape, pieces in by_shape.items():
        wanted = [signature.count(shape) for signature in signatures]
        takers = [p for turn in range(max(wanted)) for p, number in enumerate(wanted) if turn < number]
        for p, piece in zip(takers, sorted(pieces, key=lambda s: shapes[s.name]), strict=True):
            fragments[p].append(piece)

    def place(s: Slice) -> tuple[Shape, Shape]:
        return _slice_shape(shapes[s.name], s), shapes[s.name]

    return tuple(tuple(sorted(fragment, key=place, reverse=True)) for fragment in fragments)


def _deal(counts: dict[Shape, int], num_fragments: int) -> list[list[Shape]]:
    """Choose the shapes of every fragment: fewest distinct signatures among the well-balanced ways."""
    divisors = [g for g in range(1, num_fragments + 1) if num_fragments % g == 0]
    ways = [_deal_in_groups(counts, num_fragments, group) for group in divisors]
    peaks = [_peak(way) for way in ways]
    good = [k for k, peak in enumerate(peaks) if peak <= _TOLERATED_PEAK * min(peaks)]
    return ways[min(good, key=lambda k: (len(set(map(tuple, ways[k]))), peaks[k]))]


def _deal_in_groups(counts: dict[Shape, int], num_fragments: int, group: int) -> list[list[Shape]]:
    """Deal to all fragments at once while the slices last, then to groups, then one by one.

    Args:
        counts: number of slices by shape, largest first.
        num_fragments: P.
        group: how many fragments stay alike in the second round; divides P.
    """
    loads, fragments = [0] * num_fragments, [list[Shape]() for _ in range(num_fragments)]
    left = dict(counts)
    for alike in (num_fragments, group, 1):
        for shape in counts:
            dealt, left[shape] = divmod(left[shape], alike)
            for _ in range(dealt):
                lightest = min(range(0, num_fragments, alike), key=loads.__getitem__)
                for p in range(lightest, lightest + alike):
                    loads[p] += prod(shape)
                    fragments[p].append(shape)
    # One order of shapes everywhere: dealt in different rounds, the same shapes must still give the same signature.
    return [sorted(fragment, reverse=True) for fragment in fragments]
