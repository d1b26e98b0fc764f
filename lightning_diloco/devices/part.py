"""One rank's part of the fragments of a learner whose parameters are sharded over several ranks.

1. A rank's part of a parameter is a box (rows, columns), as FSDP2 and tensor parallelism shard it, or a range of
   elements, as FSDP does.
2. Anchors, snapshots and landings cover only the rank's own boxes. A rank holds a whole fragment only in host memory:
   encoded during a transfer, or unencoded when it arrives in full.
3. A rank decodes only the quantization blocks that intersect its boxes. Every element gets the same bits as on one
   device. A rank that holds some columns of a parameter decodes whole rows.
4. Contributions are resharded to ranges of whole quantization blocks (`deal.py`), and each rank encodes one range.
   Together these are bit for bit what one device sends. If the ranks cannot upload, one rank assembles the whole
   contribution (`assemble`).

Shapes: _P flat padded fragment, _L one rank's flat part.
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
from lightning_diloco.devices.accelerator import AcceleratorFragments
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.devices.dense import DenseFragments, Snapshot

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and size along each dimension of a parameter; with one dimension, a range of the flattened parameter."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's box of one slice.

    Args:
        whole: the slice in the whole fragment.
        own: the box in the rank's part.
        starts: where the box starts in the slice, by dimension.
    """

    whole: Entry
    own: Entry
    starts: tuple[int, ...]

    def window(self, flat_P: Tensor) -> Tensor:
        """Return a view of the box in a whole fragment."""
        view = self.whole.of(flat_P).view(self.whole.shape)
        for dim, (start, size) in enumerate(zip(self.starts, self.own.shape, strict=True)):
            view = view.narrow(dim, start, size)
        return view

    def read(self, decoder: Decoder, out: Tensor, block_size: int) -> None:
        """Decode the box, some rows at a time.

        Args:
            decoder: decoder of the whole fragment.
            out: float32 with the number of elements of the box; overwritten.
            block_size: values that share a quantization scale.
        """
        width = prod(self.whole.shape[1:])
        (first, *_), (num_rows, *_) = self.starts or (0,), self.own.shape or (1,)
        step = max(1, CHUNK_NUMEL // width)
        scratch = torch.empty(min(step, num_rows) * width + 2 * block_size)  # rows may start and end inside a block
        for row, rows in zip(range(0, num_rows, step), out.view(num_rows, -1).split(step), strict=True):
            start = self.whole.offset + (first + row) * width
            stop = start + len(rows) * width
            low, high = start // block_size * block_size, -(-stop // block_size) * block_size
            view = decoder.read(low, scratch[: high - low])[start - low : stop - low].view(-1, *self.whole.shape[1:])
            for dim, (at, size) in enumerate(zip(self.starts[1:], self.own.shape[1:], strict=True), start=1):
                view = view.narrow(dim, at, size)
            rows.view(view.shape).copy_(view)


class PartPlan:
    """A fragment plan for one rank's boxes; `layout` refers to rows of the rank's own tensors.

    Args:
        plan: the run's fragment plan.
        boxes: this rank's boxes, by parameter name.
        block_size: the run's block size.
    """

    def __init__(self, plan: FragmentPlan, boxes: Mapping[str, Box], block_size: int) -> None:
        self.shapes, self.num_fragments = plan.shapes, plan.num_fragments
        self.wholes = [plan.layout(p, block_size) for p in range(plan.num_fragments)]
        self.pieces = [_pieces(whole, boxes) for whole in self.wholes]

    def layout(self, p: int, block_size: int) -> FragmentLayout:
        """Return the layout of the rank's part of fragment p, without padding because parts are not encoded."""
        entries = tuple(piece.own for piece in self.pieces[p])
        numel = sum(entry.numel for entry in entries)
        return FragmentLayout(entries, numel=numel, padded_numel=numel)

    def cut(self, p: int, flat_P: Tensor) -> Tensor:
        """Cut this rank's part, (L,), out of a whole fragment."""
        parts = [piece.window(flat_P).reshape(-1) for piece in self.pieces[p]]
        return torch.cat(parts) if parts else flat_P[:0]

    def decoded(self, p: int, encoded: Tensor, config: RunConfig) -> Tensor:
        """Decode this rank's part of an encoded fragment: float32 (L,) on the host.

        Raises:
            CorruptMessageError: see `Decoder`, which checks the whole fragment.
        """
        decoder = Decoder(encoded, self.wholes[p].padded_numel, config.wire, config.block_size)
        out_L = torch.empty(sum(piece.own.numel for piece in self.pieces[p]))
        for piece in self.pieces[p]:
            piece.read(decoder, piece.own.of(out_L), config.block_size)
        return out_L

    def put(self, p: int, flat_L: Tensor, out_P: Tensor) -> None:
        """Write this rank's part into a whole fragment."""
        for piece in self.pieces[p]:
            piece.window(out_P).copy_(piece.own.of(flat_L).view(piece.own.shape))


def assemble(plans: Sequence[PartPlan], p: int, parts_L: Sequence[Tensor]) -> Tensor:
    """Assemble a whole fragment from all ranks' parts: float32 (P,) on the host, zero padding."""
    whole_P = torch.zeros(plans[0].wholes[p].padded_numel, dtype=torch.float32)
    for plan, part_L in zip(plans, parts_L, strict=True):
        plan.put(p, part_L, whole_P)
    return whole_P


class PartFragments(DenseFragments):
    """Mixin for one rank's part: inputs are whole fragments, (P,); outputs are the rank's part, (L,).

    Args:
        plan: the run's fragment plan.
        params: this rank's tensors by name.
        config: the run's config.
        learner: this learner's config.
        boxes: the boxes of these tensors in their parameters.

    Attributes:
        part: this rank's part of the plan.
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
        """Return anchor minus snapshot, float32 (L,) on the host. Link thread."""
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
        """Add this rank's part, which `stage` has already decoded."""
        return out_P.add_(encoded, alpha=sign)


class CpuPart(PartFragments, CpuFragments):
    """A rank's part in host memory."""


class AcceleratorPart(PartFragments, AcceleratorFragments):
    """A rank's part on one accelerator."""


def _pieces(whole: FragmentLayout, boxes: Mapping[str, Box]) -> list[Piece]:
    found, offset = list[Piece](), 0
    for each in whole.entries:
        firsts, sizes = boxes[each.slice.name]
        entry = _in_a_row(each) if len(firsts) == 1 != len(each.shape) else each
        own, starts, shape = Slice(entry.slice.name, 0, 1), Shape(), Shape()
        if entry.shape:  # not a scalar
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
    """Return the same slice as a range of the flattened parameter."""
    each = prod(entry.shape[1:])
    rows = Slice(entry.slice.name, entry.slice.start_row * each, entry.slice.stop_row * each)
    return replace(entry, slice=rows, shape=(entry.numel,))
