"""Merge of one round's contributions into one outer gradient.

Each learner m has a share a_m of the fleet's work; the shares sum to 1 if all learners contribute
(`protocol/syncer/shares.py`). Every slice v is merged separately:

    mean:          sum(a_m v_m)
    RDA:           sum(a_m |v_m|) * phi(u),   u = sum(a_m phi(v_m)) / sum(a_m),   phi(x) = x / |x|,  phi(0) = 0
    trimmed mean:  sum(a_m) * mean of v_m without the k largest and the k smallest, per coordinate, k = max(1, M // 4)
    median:        sum(a_m) * median of v_m, per coordinate; of an even number, the mean of the two in the middle

1. One contributor: a_m v_m, the identity if it is the whole fleet.
2. Directions that cancel (|u| below 0.01: the rest is quantization noise) fall back to the mean.
3. Trimmed mean and median weight all contributions equally, independent of their work. They need MIN_ROBUST
   contributions; fewer are merged by the mean. Embeddings are always merged by the mean, because otherwise a row that
   few learners saw would never move.
4. RDA and mean are weighted sums. The coefficients of RDA follow from the dot products of the contributions
   (`core/encoded.py`), which are exact except for the rounding of float64 sums in a fixed order.
5. The result depends on the order of the contributors; the caller sorts them.
6. A contribution longer than its limit is scaled down before the merge, in encoded form (`core.quantize.scaled`). Its
   learner does the same with the bytes that it kept, and so subtracts exactly what was merged.

Shapes: _P flat values, _C a chunk of them, _MC (contributors, chunk).
Source: arXiv 2604.21428, Section 3.2 and Appendix D.2; trimmed mean and median: arXiv 1803.01498; the fallbacks are
our choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_diloco.config import Merge, Wire
from lightning_diloco.core import native
from lightning_diloco.core.encoded import Chunks, Encoded, Measured
from lightning_diloco.core.layout import FragmentLayout, zero_padding
from lightning_diloco.errors import ConfigError

MIN_ROBUST = 3
_CANCELLED = 0.01
_ROUNDING = 1e-9  # tolerance of the sum of shares
_SMALLEST = torch.finfo(torch.float32).tiny  # a shorter contribution has no direction

Gram = list[list[float]]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Statistics of the contributions to one outer gradient, in the order of the contributions.

    Args:
        norms: Euclidean norm of each contribution over the whole fragment, before scaling.
        kept: factor by which each contribution was scaled, 1 if its norm is within its limit.
        cosines: cosine between each contribution and the outer gradient; 0 if either is zero.
        merged_norm: Euclidean norm of the outer gradient before rounding to bfloat16.
    """

    norms: tuple[float, ...]
    kept: tuple[float, ...]
    cosines: tuple[float, ...]
    merged_norm: float


def merge_fragment(
    layout: FragmentLayout,
    contributions: Sequence[Tensor],
    shares: Sequence[float],
    *,
    wire: Wire,
    block_size: int,
    merge: Merge,
    max_norms: Sequence[float] | None = None,
    measured: Measured | None = None,
) -> tuple[Tensor, MergeReport]:
    """Merge encoded contributions to one fragment.

    Args:
        layout: the fragment's layout.
        contributions: uint8 buffers from `encode`, in an order that is the same on every replay.
        shares: each contributor's share of the fleet's work, above 0, with a sum of at most 1.
        wire: precision of the buffers.
        block_size: block size of buffers and layout.
        merge: "mean" for everything, or one of the others for all but the entries that say "mean".
        max_norms: a contribution longer than its limit is scaled down to it; None: no limits.
        measured: dot products of these contributions, if they were computed before.

    Returns:
        The outer gradient, (P,) bfloat16 with zero padding, and a report.

    Raises:
        ConfigError: no contributions, or invalid shares.
        CorruptMessageError: a buffer has the wrong length or holds non-finite values.
    """
    _check_shares(shares, len(contributions))
    source = Encoded(contributions, layout.padded_numel, wire, block_size)
    measured = measured or source.measured(layout)
    norms = measured.norms
    limits = [math.inf] * len(norms) if max_norms is None else max_norms
    kept = [limit / norm if norm > limit else 1.0 for norm, limit in zip(norms, limits, strict=True)]
    if min(kept) < 1:
        source = source.scaled(kept)
        measured = source.measured(layout)
    out_P = native.empty(layout.padded_numel, torch.bfloat16)
    zero_padding(layout, out_P)
    square, dots = 0.0, [0.0] * len(norms)
    for entry, gram in zip(layout.entries, measured.gram_EMM.tolist(), strict=True):
        kind = "mean" if entry.merge == "mean" else merge
        if kind in ("trimmed_mean", "median") and len(shares) >= MIN_ROBUST:
            merged = entry.of(out_P)
            slice_square, slice_dots = _middle(
                source.chunks(entry), math.fsum(shares), _num_cut(kind, len(shares)), merged
            )
        else:
            coefs = _rda_coefs(gram, shares) if kind == "rda" and len(shares) > 1 else shares
            source.weighted_sum(entry, coefs, out_P)
            slice_square, slice_dots = _square(gram, coefs), _dots(gram, coefs)
        square += slice_square
        dots = [total + dot for total, dot in zip(dots, slice_dots, strict=True)]
    merged_norm = math.sqrt(square)
    lengths = [norm * merged_norm for norm in measured.norms]
    cosines = [dot / length if length else 0.0 for dot, length in zip(dots, lengths, strict=True)]
    return out_P, MergeReport(tuple(norms), tuple(kept), tuple(cosines), merged_norm)


def _rda_coefs(gram: Gram, shares: Sequence[float]) -> Sequence[float]:
    """Return the coefficients with which the weighted sum is the RDA; the shares if directions cancel."""
    norms, whole = [math.sqrt(row[m]) for m, row in enumerate(gram)], math.fsum(shares)
    directions = [share / whole / norm if norm > _SMALLEST else 0.0 for share, norm in zip(shares, norms, strict=True)]
    square = _square(gram, directions)
    if square <= _CANCELLED**2:
        return shares
    radius = math.fsum(share * norm for share, norm in zip(shares, norms, strict=True))
    return [radius / math.sqrt(square) * direction for direction in directions]


def _dots(gram: Gram, coefs: Sequence[float]) -> list[float]:
    """Return the dot product of the weighted sum with each contribution."""
    return [math.fsum(dot * coef for dot, coef in zip(row, coefs, strict=True)) for row in gram]


def _square(gram: Gram, coefs: Sequence[float]) -> float:
    """Return the squared norm of the weighted sum; rounding may leave less than 0 of a sum that is zero."""
    return max(0.0, math.fsum(dot * coef for dot, coef in zip(_dots(gram, coefs), coefs, strict=True)))


def _num_cut(kind: Merge, num_contributors: int) -> int:
    """Return how many of the largest, and how many of the smallest values of a coordinate are left out."""
    return (num_contributors - 1) // 2 if kind == "median" else max(1, num_contributors // 4)


def _middle(chunks: Chunks, scale: float, num_cut: int, out_P: Tensor) -> tuple[float, list[float]]:
    """Write scale times the mean of the remaining values of each coordinate to out_P, bfloat16.

    Returns:
        The squared norm of the result, and its dot product with each contribution.
    """
    square, dots = 0.0, list[float]()
    for start, values_MC in chunks():
        ordered_MC = values_MC.sort(dim=0).values
        total_C = ordered_MC[num_cut : len(values_MC) - num_cut].mean(dim=0).mul_(scale)
        out_P[start : start + len(total_C)] = total_C
        square += float(total_C.double().square().sum())
        found = [float(torch.dot(values, total_C)) for values in values_MC]
        dots = [dot + more for dot, more in zip(dots or [0.0] * len(found), found, strict=True)]
    return square, dots


def _check_shares(shares: Sequence[float], num_contributors: int) -> None:
    if len(shares) != num_contributors or not num_contributors:
        raise ConfigError(
            f"{num_contributors} contributions with {len(shares)} shares: a merge needs at least one contribution "
            "and one share per contribution; abort rounds without payloads"
        )
    if not (min(shares) > 0 and math.fsum(shares) <= 1 + _ROUNDING):
        raise ConfigError(f"shares {list(shares)}: must be above 0 and sum to at most 1; use shares_of_work()")
