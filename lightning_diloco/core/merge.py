"""From the contributions of one round to one outer gradient.

With weights w_m = tokens_m^2 / steps_m, normalized to a_m = w_m / sum(w), every slice v is merged on its own:

    mean:  sum(a_m v_m)
    RDA:   sum(a_m |v_m|) * phi(u),   u = sum(a_m phi(v_m)),   phi(x) = x / |x|,  phi(0) = 0

1. One contributor: the identity, bit for bit.
2. Directions that cancel (|u| below 0.01: what is left is quantization noise) fall back to the mean.
3. Lengths are taken per chunk and added up in float64, in the fixed order of the chunks: a float32 norm of 10^8
   elements is 1 % off. The result depends on the order of the contributors; the caller sorts them.
4. Contributions stay encoded. Each is decoded twice, chunk by chunk: once for its norms, once to be added up.

Shapes: _P flat values, _MC (contributors, chunk), _EM (entries, contributors).
Source: arXiv 2604.21428, Section 3.2 and Appendix D.2; the fallback is our choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_diloco.config import Merge, Wire
from lightning_diloco.core.layout import Entry, FragmentLayout
from lightning_diloco.core.quantize import Decoder
from lightning_diloco.errors import ConfigError

_CANCELLED = 0.01
_SMALLEST = torch.finfo(torch.float32).tiny  # the inverse of a smaller norm is Inf in float32
_CHUNK_NUMEL = 1 << 17  # of each contributor: eight of them take 4 MiB, a share of a server's last-level cache

# Every call walks over the chunks of one slice from the start: yields (start, the values of all contributors there).
_Chunks = Callable[[], Iterator[tuple[int, Tensor]]]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What the contributions to one outer gradient looked like, in the order they were given.

    Args:
        norms: Euclidean norm of each contribution over the whole fragment, before clipping.
        cosines: cosine between each contribution and the outer gradient; 0 if either is zero.
        merged_norm: Euclidean norm of the outer gradient before it is rounded to bfloat16.
    """

    norms: tuple[float, ...]
    cosines: tuple[float, ...]
    merged_norm: float


def contribution_weight(tokens: int, steps: int) -> float:
    """Weight of a contribution: quantity times quality, tokens * (tokens / steps), from exact integers.

    Raises:
        ConfigError: tokens or steps below 1.
    """
    if tokens < 1 or steps < 1:
        raise ConfigError(
            f"tokens={tokens}, steps={steps}: a contribution needs at least one of each; refuse it before merging"
        )
    return tokens * tokens / steps


def weighted_mean(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Plain weighted mean of one tensor.

    Args:
        deltas: pseudo-gradients of one shape.
        weights: one finite number >= 0 each, not all 0.

    Returns:
        float32 of that shape.
    """
    return _merge_tensors(deltas, weights, "mean")


def radial_directional_average(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Average lengths and directions apart, so that the norm does not shrink with the number of contributors.

    Args:
        deltas: pseudo-gradients of one shape.
        weights: one finite number >= 0 each, not all 0.

    Returns:
        float32 of that shape.

    Source: arXiv 2604.21428, Appendix D.2.
    """
    return _merge_tensors(deltas, weights, "rda")


def merge_fragment(
    layout: FragmentLayout,
    contributions: Sequence[Tensor],
    weights: Sequence[float],
    *,
    wire: Wire,
    block_size: int,
    merge: Merge,
    max_norm: float = math.inf,
) -> tuple[Tensor, MergeReport]:
    """Merge encoded contributions to one fragment.

    Args:
        layout: of the fragment.
        contributions: uint8 buffers from `encode`, in an order that is the same on every replay.
        weights: one finite number >= 0 each, not all 0.
        wire: precision of the buffers.
        block_size: of buffers and layout.
        merge: "mean" for everything, or "rda" for all but the entries that say "mean".
        max_norm: longer contributions are scaled down to this norm.

    Returns:
        The outer gradient, (P,) bfloat16 with zero padding, and a report.

    Raises:
        ConfigError: no contributions, or bad weights.
        CorruptMessageError: a buffer has the wrong length or values that are not finite.
    """
    shares = _shares(weights, len(contributions))
    source = _Encoded([Decoder(buffer, layout.padded_numel, wire, block_size) for buffer in contributions], block_size)
    norms_EM = torch.tensor([_norms(source.chunks(e), len(shares)) for e in layout.entries], dtype=torch.float64)
    norms = norms_EM.square().sum(0).sqrt().tolist()
    clips = [min(1.0, max_norm / norm) if norm else 1.0 for norm in norms]
    out_P = torch.zeros(layout.padded_numel, dtype=torch.bfloat16)
    sum_P = torch.empty(max(entry.numel for entry in layout.entries), dtype=torch.float32)
    square, dots = 0.0, [0.0] * len(shares)
    for entry, slice_norms in zip(layout.entries, norms_EM.tolist(), strict=True):
        kind = entry.merge if merge == "rda" else "mean"
        merged = sum_P[: entry.numel]
        slice_square, slice_dots = _merge_slice(
            source.chunks(entry), shares, clips, slice_norms, kind=kind, out_P=merged
        )
        entry.of(out_P).copy_(merged)
        square += slice_square
        dots = [total + dot for total, dot in zip(dots, slice_dots, strict=True)]
    merged_norm = math.sqrt(square)
    lengths = [norm * merged_norm for norm in norms]
    cosines = [dot / length if length else 0.0 for dot, length in zip(dots, lengths, strict=True)]
    return out_P, MergeReport(tuple(norms), tuple(cosines), merged_norm)


class _Encoded:
    """Encoded contributions, decoded chunk by chunk into one scratch buffer."""

    def __init__(self, decoders: Sequence[Decoder], block_size: int) -> None:
        self._decoders = decoders
        self._block_size = block_size
        self._scratch_MC = torch.empty(len(decoders), _CHUNK_NUMEL, dtype=torch.float32)

    def chunks(self, entry: Entry) -> _Chunks:
        def walk() -> Iterator[tuple[int, Tensor]]:
            for start in range(0, entry.numel, _CHUNK_NUMEL):
                numel = min(_CHUNK_NUMEL, entry.numel - start)
                padded = -(-numel // self._block_size) * self._block_size
                for decoder, row in zip(self._decoders, self._scratch_MC, strict=True):
                    decoder.read(entry.offset + start, row[:padded])
                yield start, self._scratch_MC[:, :numel]

        return walk


def _merge_slice(
    chunks: _Chunks, shares: list[float], clips: list[float], norms: list[float], *, kind: Merge, out_P: Tensor
) -> tuple[float, list[float]]:
    """Merge one slice into out_P, float32; returns its squared norm and its dot product with every contribution."""
    mean = [share * clip for share, clip in zip(shares, clips, strict=True)]
    if kind == "rda" and len(shares) > 1:
        radius = sum(coef * norm for coef, norm in zip(mean, norms, strict=True))
        directions = [share / norm if norm > _SMALLEST else 0.0 for share, norm in zip(shares, norms, strict=True)]
        square, dots = _weighted_sum(chunks, directions, out_P)
        if square > _CANCELLED**2:
            scale = radius / math.sqrt(square)
            out_P.mul_(scale)
            return radius**2, [dot * scale for dot in dots]
    return _weighted_sum(chunks, mean, out_P)


def _weighted_sum(chunks: _Chunks, coefs: list[float], out_P: Tensor) -> tuple[float, list[float]]:
    """Write sum(coef_m v_m) to out_P; returns its squared norm and its dot products with all v_m."""
    square, dots = 0.0, [0.0] * len(coefs)
    for start, values_MC in chunks():
        total = out_P[start : start + values_MC.shape[1]]
        torch.mul(values_MC[0], coefs[0], out=total)
        for values, coef in zip(values_MC[1:], coefs[1:], strict=True):
            total.add_(values, alpha=coef)
        square += _norm(total) ** 2
        dots = [dot + float(torch.dot(values, total)) for dot, values in zip(dots, values_MC, strict=True)]
    return square, dots


def _norms(chunks: _Chunks, num_contributors: int) -> list[float]:
    squares = [0.0] * num_contributors
    for _, values_MC in chunks():
        squares = [square + _norm(values) ** 2 for square, values in zip(squares, values_MC, strict=True)]
    return [math.sqrt(square) for square in squares]


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _merge_tensors(deltas: Sequence[Tensor], weights: Sequence[float], kind: Merge) -> Tensor:
    shares = _shares(weights, len(deltas))
    flat = [delta.reshape(-1).float() for delta in deltas]

    def chunks() -> Iterator[tuple[int, Tensor]]:
        for start in range(0, flat[0].numel(), _CHUNK_NUMEL):
            yield start, torch.stack([values[start : start + _CHUNK_NUMEL] for values in flat])

    out = torch.empty_like(flat[0])
    _merge_slice(chunks, shares, [1.0] * len(flat), _norms(chunks, len(flat)), kind=kind, out_P=out)
    return out.view(deltas[0].shape)


def _shares(weights: Sequence[float], num_contributors: int) -> list[float]:
    """Weights that sum to 1."""
    if len(weights) != num_contributors or not num_contributors:
        raise ConfigError(
            f"{num_contributors} contributions with {len(weights)} weights: a merge needs at least one contribution "
            "and one weight for each; abort rounds without payloads"
        )
    total = math.fsum(weights)
    if not (0.0 < total < math.inf and min(weights) >= 0.0):
        raise ConfigError(
            f"weights {list(weights)}: must be finite, at least 0 and not all 0; take them from contribution_weight()"
        )
    return [weight / total for weight in weights]
