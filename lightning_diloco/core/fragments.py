"""Division of a model into fragments, a pure function of names, shapes and two numbers.

1. A slice is a row range of one parameter (row: index along dimension 0; a scalar has one row). Every element of the
   model is in exactly one slice, every slice is in exactly one fragment, and no fragment is empty.
2. As far as whole rows allow, no slice is larger than max_slice_numel or than an even share of the model (or a half,
   quarter or eighth of a share, if the fragments would otherwise be uneven). A parameter is cut into equal pieces if
   at most twice the needed number of pieces allows this, else into pieces that differ by one row.
3. Fragments are filled greedily: the largest slice goes to the lightest fragment. Slices of equal shape are dealt to
   whole groups of fragments at once, because fragments of one group then have the same shape signature, and every
   distinct signature costs an accelerator one more compilation. The group size with the fewest signatures is used.
   The slices of one parameter are spread over fragments, because a fragment with two slices of one parameter would
   need another compilation than one with slices of two parameters.
4. Peak <= mean + one slice, because a slice is only ever added to a lightest fragment.

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

# Slices are at most 1/n of an even share, with the first n whose peak is at most _WANTED_PEAK shares. Our choice.
_FINENESSES = (1, 2, 4, 8)
_WANTED_PEAK = 1.1

# A plan with fewer signatures may have this multiple of the most balanced plan's peak. Our choice.
_TOLERATED_PEAK = 1.05


@dataclass(frozen=True)
class FragmentPlan:
    """The assignment of parameter slices to fragments.

    Args:
        shapes: full shape of every parameter, sorted by name.
        fragments: the slices of each fragment, in the order of its flat vector.
        mean_names: parameters merged by the plain weighted mean: embeddings, and heads tied to them.
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
            shapes: shape by parameter name, in any order; tied weights appear once.
            num_fragments: P, >= 1; the plan has fewer if the model has fewer slices.
            max_slice_numel: largest slice in elements, >= 1; a single row may exceed it.
            mean_names: names in shapes that are merged by the plain mean.

        Raises:
            ConfigError: no parameters, empty parameters, unknown mean_names, or numbers below 1; lists all problems.
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
        """Return the SHA-256 in hex of the plan as canonical JSON; learner and syncer compare it at a join."""
        fragments = [[[s.name, s.start_row, s.stop_row] for s in fragment] for fragment in self.fragments]
        content = {"shapes": self.shapes, "fragments": fragments, "mean_names": sorted(self.mean_names)}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    @property
    def num_fragments(self) -> int:
        """Return P, the number of fragments in the plan."""
        return len(self.fragments)

    def numel(self, p: int) -> int:
        """Return the number of elements of fragment p, without padding."""
        return sum(prod(self.slice_shape(s)) for s in self.fragments[p])

    def slice_shape(self, s: Slice) -> Shape:
        """Return the shape of a slice: that of its parameter with fewer rows, or () for a scalar."""
        return _slice_shape(self.shapes[s.name], s)

    def signatures(self) -> tuple[tuple[Shape, ...], ...]:
        """Return the distinct lists of slice shapes of the fragments, in order of first appearance."""
        return tuple(dict.fromkeys(tuple(map(self.slice_shape, fragment)) for fragment in self.fragments))

    def layout(self, p: int, block_size: int) -> FragmentLayout:
        """Return the layout of fragment p; each slice starts at a multiple of block_size elements."""
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
        f"mean_names holds {name!r}: must be a parameter of the plan; use the names from named_parameters()"
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
    """Assign slices to fragments; slices of one shape go round-robin, which spreads those of a parameter (rule 3)."""
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
    """Choose the slice shapes of every fragment: the well-balanced division with the fewest distinct signatures."""
    divisors = [g for g in range(1, num_fragments + 1) if num_fragments % g == 0]
    ways = [_deal_in_groups(counts, num_fragments, group) for group in divisors]
    peaks = [_peak(way) for way in ways]
    good = [k for k, peak in enumerate(peaks) if peak <= _TOLERATED_PEAK * min(peaks)]
    return ways[min(good, key=lambda k: (len(set(map(tuple, ways[k]))), peaks[k]))]


def _deal_in_groups(counts: dict[Shape, int], num_fragments: int, group: int) -> list[list[Shape]]:
    """Deal slices to all fragments at once while they last, then to groups, then to single fragments.

    Args:
        counts: number of slices by shape, largest shape first.
        num_fragments: P.
        group: number of fragments per group in the second round; divides P.
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
    # Sorted, so that the same shapes give the same signature even if they were dealt in different rounds.
    return [sorted(fragment, reverse=True) for fragment in fragments]
