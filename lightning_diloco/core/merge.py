"""Merge of one round's contributions into one outer gradient.

Each learner m has a share a_m of the fleet's work; the shares sum to 1 if all learners contribute
(`protocol/shares.py`). Every slice v is merged separately:

    mean:  sum(a_m v_m)
    RDA:   sum(a_m |v_m|) * phi(u),   u = sum(a_m phi(v_m)) / sum(a_m),   phi(x) = x / |x|,  phi(0) = 0

1. With one contributor the result is a_m v_m, the identity if this learner is the whole fleet.
2. If directions cancel (|u| below 0.01, where only quantization noise is left), RDA falls back to the mean.
3. Norms are computed per chunk and summed in float64, in the fixed order of the chunks, because a float32 norm of 10^8
   elements has an error of 1 %. The result depends on the order of the contributors; the caller sorts them.
4. Contributions stay encoded. Each is decoded twice, chunk by chunk: once for its norms and once for the sum.
5. A contribution longer than its limit is scaled down, in encoded form, before it is merged (`core.quantize.scaled`).
   Its learner scales the bytes it kept in the same way and so subtracts exactly what was merged.

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
from lightning_diloco.core.quantize import Decoder, scaled
from lightning_diloco.errors import ConfigError

_CANCELLED = 0.01
_ROUNDING = 1e-9  # tolerance of the sum of shares
_SMALLEST = torch.finfo(torch.float32).tiny  # the inverse of a smaller norm is Inf in float32
_CHUNK_NUMEL = 1 << 17  # per contributor; eight of them take 4 MiB, which fits into a server's last-level cache

# Every call iterates over the chunks of one slice and yields (start, values of all contributors).
_Chunks = Callable[[], Iterator[tuple[int, Tensor]]]


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
) -> tuple[Tensor, MergeReport]:
    """Merge encoded contributions to one fragment.

    Args:
        layout: the fragment's layout.
        contributions: uint8 buffers from `encode`, in an order that is the same on every replay.
        shares: each contributor's share of the fleet's work, above 0, with a sum of at most 1.
        wire: precision of the buffers.
        block_size: block size of buffers and layout.
        merge: "mean" for all entries, or "rda" for all entries except those marked "mean".
        max_norms: limit of each contribution's norm; longer ones are scaled down to it. None means no limits.

    Returns:
        The outer gradient, (P,) bfloat16 with zero padding, and a report.

    Raises:
        ConfigError: no contributions, or invalid shares.
        CorruptMessageError: a buffer has the wrong length or holds non-finite values.
    """
    _check_shares(shares, len(contributions))
    source = _Encoded(contributions, layout.padded_numel, wire, block_size)
    norms_EM = source.norms(layout)
    norms = _whole(norms_EM)
    limits = [math.inf] * len(norms) if max_norms is None else max_norms
    kept = [limit / norm if norm > limit else 1.0 for norm, limit in zip(norms, limits, strict=True)]
    if min(kept) < 1:
        source = source.scaled(kept)
        norms_EM = source.norms(layout)
    out_P = torch.zeros(layout.padded_numel, dtype=torch.bfloat16)
    sum_P = torch.empty(max(entry.numel for entry in layout.entries), dtype=torch.float32)
    square, dots = 0.0, [0.0] * len(norms)
    for entry, slice_norms in zip(layout.entries, norms_EM.tolist(), strict=True):
        kind = entry.merge if merge == "rda" else "mean"
        merged = sum_P[: entry.numel]
        slice_square, slice_dots = _merge_slice(source.chunks(entry), shares, slice_norms, kind=kind, out_P=merged)
        entry.of(out_P).copy_(merged)
        square += slice_square
        dots = [total + dot for total, dot in zip(dots, slice_dots, strict=True)]
    merged_norm = math.sqrt(square)
    lengths = [norm * merged_norm for norm in _whole(norms_EM)]
    cosines = [dot / length if length else 0.0 for dot, length in zip(dots, lengths, strict=True)]
    return out_P, MergeReport(tuple(norms), tuple(kept), tuple(cosines), merged_norm)


def _whole(norms_EM: Tensor) -> list[float]:
    """Return the norms over the whole fragment from the norms per entry."""
    return [float(norm) for norm in norms_EM.square().sum(0).sqrt()]


class _Encoded:
    """Encoded contributions, decoded chunk by chunk into one scratch buffer."""

    def __init__(self, buffers: Sequence[Tensor], numel: int, wire: Wire, block_size: int) -> None:
        self._buffers, self._numel, self._wire, self._block_size = buffers, numel, wire, block_size
        self._decoders = [Decoder(buffer, numel, wire, block_size) for buffer in buffers]
        self._scratch_MC = torch.empty(len(buffers), _CHUNK_NUMEL, dtype=torch.float32)

    def scaled(self, factors: Sequence[float]) -> _Encoded:
        """Return the contributions, those with a factor below 1 multiplied by it."""
        numel, wire, size = self._numel, self._wire, self._block_size
        buffers = [
            scaled(buffer, factor, numel=numel, wire=wire, block_size=size) if factor < 1 else buffer
            for buffer, factor in zip(self._buffers, factors, strict=True)
        ]
        return _Encoded(buffers, numel, wire, size)

    def norms(self, layout: FragmentLayout) -> Tensor:
        """Return the norms of all entries, float64 (E, M)."""
        found = [_norms(self.chunks(entry), len(self._decoders)) for entry in layout.entries]
        return torch.tensor(found, dtype=torch.float64)

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
    chunks: _Chunks, shares: Sequence[float], norms: list[float], *, kind: Merge, out_P: Tensor
) -> tuple[float, list[float]]:
    """Merge one slice into out_P, float32; return its squared norm and its dot product with every contribution."""
    if kind == "rda" and len(shares) > 1:
        radius = sum(share * norm for share, norm in zip(shares, norms, strict=True))
        in_sum = [share / math.fsum(shares) for share in shares]
        directions = [each / norm if norm > _SMALLEST else 0.0 for each, norm in zip(in_sum, norms, strict=True)]
        square, dots = _weighted_sum(chunks, directions, out_P)
        if square > _CANCELLED**2:
            scale = radius / math.sqrt(square)
            out_P.mul_(scale)
            return radius**2, [dot * scale for dot in dots]
    return _weighted_sum(chunks, shares, out_P)


def _weighted_sum(chunks: _Chunks, coefs: Sequence[float], out_P: Tensor) -> tuple[float, list[float]]:
    """Write sum(coef_m v_m) to out_P; return its squared norm and its dot products with all v_m."""
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


def _check_shares(shares: Sequence[float], num_contributors: int) -> None:
    if len(shares) != num_contributors or not num_contributors:
        raise ConfigError(
            f"{num_contributors} contributions with {len(shares)} shares: a merge needs at least one contribution "
            "and one share per contribution; abort rounds without payloads"
        )
    if not (min(shares) > 0 and math.fsum(shares) <= 1 + _ROUNDING):
        raise ConfigError(f"shares {list(shares)}: must be above 0 and sum to at most 1; use shares_of_work()")
