"""Fragments whose parameters are spread over the ranks of a learner: what one rank holds of them, and only that.

1. A rank's part of a parameter is a box of it (rows, columns), as FSDP2 and tensor parallel cut it, or a range of its
   elements, as FSDP does.
2. Anchors, snapshots and landings are of the own boxes. Only encoded is a fragment on its way whole, in host memory,
   or where it is adopted in full.
3. Of what arrives, the blocks that reach into the own boxes are decoded: every element is computed as on one device,
   bit for bit. A rank with columns of a parameter decodes the blocks of all of its rows.
4. Contributions are dealt out in ranges of whole quantization blocks (`deal.py`), and each rank encodes one: together
   these are what one device sends, bit for bit. Where ranks cannot upload, one of them puts it together (`assemble`).

Shapes: _P flat padded fragment, _L flat part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.blocks import CHUNK_NUMEL
from lightning_diloco.core.fragments import Entry, FragmentLayout, FragmentPlan, Shape, Slice
from lightning_diloco.core.pseudogradient import pseudo_gradient
from lightning_diloco.core.quantize import Decoder
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.devices.cuda import CudaFragments
from lightning_diloco.devices.dense import DenseFragments, Snapshot

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and size along each dimension of a parameter; along one dimension: of its elements in a row."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of one slice.

    Args:
        whole: the slice in the whole fragment.
        own: its rows in the rank's part.
        starts: where the box begins in the slice, by dimension.
    """

    whole: Entry
    own: Entry
    starts: tuple[int, ...]

    def window(self, flat_P: Tensor) -> Tensor:
        """A view of the box in a whole fragment."""
        view = self.whole.of(flat_P).view(self.whole.shape)
        for dim, (start, size) in enumerate(zip(self.starts, self.own.shape, strict=True)):
            view = view.narrow(dim, start, size)
        return view

    def read(self, decoder: Decoder, out: Tensor, block_size: int) -> None:
        """Decode the box, some rows at a time.

        Args:
            decoder: of the whole fragment.
            out: float32, of the own numel, overwritten.
            block_size: of the encoding.
        """
        width = prod(self.whole.shape[1:])
        (first, *_), (num_rows, *_) = self.starts or (0,), self.own.shape or (1,)
        step = max(1, CHUNK_NUMEL // width)
        scratch = torch.empty(min(step, num_rows) * width + 2 * block_size)  # rows begin and end within blocks
        for row, rows in zip(range(0, num_rows, step), out.view(num_rows, -1).split(step), strict=True):
            start = self.whole.offset + (first + row) * width
            stop = start + len(rows) * width
            low, high = start // block_size * block_size, -(-stop // block_size) * block_size
            view = decoder.read(low, scratch[: high - low])[start - low : stop - low].view(-1, *self.whole.shape[1:])
            for dim, (at, size) in enumerate(zip(self.starts[1:], self.own.shape[1:], strict=True), start=1):
                view = view.narrow(dim, at, size)
            rows.view(view.shape).copy_(view)


class PartPlan:
    """One rank's boxes as a plan: `layout` has its own rows of its own tensors.

    Args:
        plan: of the run.
        boxes: of this rank, by parameter.
        block_size: of the run.
    """

    def __init__(self, plan: FragmentPlan, boxes: Mapping[str, Box], block_size: int) -> None:
        self.shapes, self.num_fragments = plan.shapes, plan.num_fragments
        self.wholes = [plan.layout(p, block_size) for p in range(plan.num_fragments)]
        self.pieces = [_pieces(whole, boxes) for whole in self.wholes]

    def layout(self, p: int, block_size: int) -> FragmentLayout:
        """The flat part of fragment p; it is not encoded as such, so nothing is padded."""
        entries = tuple(piece.own for piece in self.pieces[p])
        numel = sum(entry.numel for entry in entries)
        return FragmentLayout(entries, numel=numel, padded_numel=numel)

    def cut(self, p: int, flat_P: Tensor) -> Tensor:
        """The part of a whole fragment, (L,)."""
        parts = [piece.window(flat_P).reshape(-1) for piece in self.pieces[p]]
        return torch.cat(parts) if parts else flat_P[:0]

    def decoded(self, p: int, encoded: Tensor, config: RunConfig) -> Tensor:
        """The part of an encoded fragment, float32 (L,) on the host.

        Raises:
            CorruptMessageError: see `Decoder`; all of what is encoded is looked at.
        """
        decoder = Decoder(encoded, self.wholes[p].padded_numel, config.wire, config.block_size)
        out_L = torch.empty(sum(piece.own.numel for piece in self.pieces[p]))
        for piece in self.pieces[p]:
            piece.read(decoder, piece.own.of(out_L), config.block_size)
        return out_L

    def put(self, p: int, flat_L: Tensor, out_P: Tensor) -> None:
        """Write a part to its places in a whole fragment."""
        for piece in self.pieces[p]:
            piece.window(out_P).copy_(piece.own.of(flat_L).view(piece.own.shape))


def assemble(plans: Sequence[PartPlan], p: int, parts_L: Sequence[Tensor]) -> Tensor:
    """A whole fragment from all ranks' parts, padding with zeros: float32 (P,) on the host."""
    whole_P = torch.zeros(plans[0].wholes[p].padded_numel, dtype=torch.float32)
    for plan, part_L in zip(plans, parts_L, strict=True):
        plan.put(p, part_L, whole_P)
    return whole_P


class PartFragments(DenseFragments):
    """Mixin: one rank's part. Values that come in are whole, (P,); those that go out are the rank's, (L,).

    Args:
        plan: of the run.
        params: this rank's tensors by name.
        config: of the run.
        learner: of this learner.
        boxes: where these tensors lie in the parameters.

    Attributes:
        part: what this rank holds of the plan.
    """

    def __init__(
        self,
        plan: FragmentPlan,
        params: Mapping[str, Tensor],
        config: RunConfig,
        learner: LearnerConfig,
        boxes: Mapping[str, Box],
    ) -> None:
        self.part = PartPlan(plan, boxes, config.block_size)
        super().__init__(self.part, params, config, learner)  # type: ignore[arg-type]

    def adopt(self, fragment: int, values: Tensor) -> None:
        """See `FragmentDevice.adopt`."""
        super().adopt(fragment, self.part.cut(fragment, values))

    def delta(self, snapshot: Snapshot) -> Tensor:
        """Anchor minus snapshot, float32 (L,) on the host. Link thread."""
        p = snapshot.fragment
        with self._aside():
            self.settle()
            scratch, delta_L = self._take(), self._flat(p, snapshot.buffer)
            pseudo_gradient(self._stored(p, self._anchors[p], scratch), delta_L, out=delta_L)
            found = delta_L.to("cpu", copy=True)
        self._spare.extend((scratch, snapshot.buffer))
        return found

    def stage(self, fragment: int, update: Update):  # type: ignore[no-untyped-def]
        """See `FragmentDevice.stage`."""
        full = None if update.full is None else self.part.cut(fragment, update.full)
        chain = tuple(self.part.decoded(fragment, encoded, self._config) for encoded in update.chain)
        sent = None if update.sent is None else self.part.decoded(fragment, update.sent, self._config)
        return super().stage(fragment, Update(full, chain, sent))

    def _add_decoded(self, encoded: Tensor, out_P: Tensor, sign: int = 1) -> Tensor:
        """Of this part, decoded before."""
        return out_P.add_(encoded, alpha=sign)


class CpuPart(PartFragments, CpuFragments):
    """In host memory."""


class CudaPart(PartFragments, CudaFragments):
    """On one CUDA device."""


def _pieces(whole: FragmentLayout, boxes: Mapping[str, Box]) -> list[Piece]:
    found, offset = list[Piece](), 0
    for each in whole.entries:
        firsts, sizes = boxes[each.slice.name]
        entry = _in_a_row(each) if len(firsts) == 1 != len(each.shape) else each
        own, starts, shape = Slice(entry.slice.name, 0, 1), Shape(), Shape()
        if entry.shape:  # no scalar
            start = max(entry.slice.start_row, firsts[0])
            stop = max(start, min(entry.slice.stop_row, firsts[0] + sizes[0]))
            own = Slice(entry.slice.name, start - firsts[0], stop - firsts[0])
            starts = (start - entry.slice.start_row, *firsts[1:])
            shape = (stop - start, *sizes[1:])
        if numel := prod(shape):
            found.append(Piece(entry, Entry(own, shape, offset, numel, entry.merge), starts))
            offset += numel
    return found


def _in_a_row(entry: Entry) -> Entry:
    """The same slice of the flattened parameter."""
    each = prod(entry.shape[1:])
    rows = Slice(entry.slice.name, entry.slice.start_row * each, entry.slice.stop_row * each)
    return replace(entry, slice=rows, shape=(entry.numel,))
