"""Fragments of a learner whose parameters are on one XLA device, or on several with SPMD.

1. The training thread traces, ends each graph with a sync, and never waits for a result. A snapshot computes and
   quantizes the pseudo-gradient on the device, so that with int8 one byte per element is copied to the host.
2. The link thread copies finished tensors to the host and host tensors to the device. It traces nothing.
3. Fragments of the same shape signature share their graphs: snapshot, landing and, with anchor_device="device", anchor
   update. The graphs have no variants. If this learner's contribution was not merged, the landing uses a contribution
   of zeros. An update over several versions runs the update graph several times. Once every signature has been
   exchanged, nothing more is compiled. Plans of 12B decoders have 3 signatures (Gemma) or 4 (Mistral): 9 or 12 graphs,
   or 6 or 8 with "host".
4. Anchors are never updated in place, because a graph donates the buffers that it updates.
5. With anchor_device="host", anchors are in host memory. The next fragment's anchor is prefetched to the device while
   the previous snapshot is collected.
6. All tensors here are sharded over the devices, in the order of layout.py.

Shapes: _P flat padded fragment on the host, _NL devices x elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import Decoder, check_fragment, wire_nbytes
from lightning_diloco.devices.base import Encoded, Update
from lightning_diloco.devices.dense import check_full
from lightning_diloco.devices.xla.codec import Parts, XlaCodec
from lightning_diloco.devices.xla.layout import Part, XlaLayout
from lightning_diloco.devices.xla.ops import cast_and_back, fetch, rows_of, sharded_dim, sync, upload, with_rows


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A contribution that the device is computing.

    Args:
        fragment: index of the fragment.
        parts: the encoded pseudo-gradient.
        norms: float32 [2], norms of the pseudo-gradient and of its encoding error.
        lost: float32 [N, L], the encoding error; None if not needed.
        found: parts and norms on the host; empty until they are collected.
    """

    fragment: int
    parts: Parts
    norms: Tensor
    lost: Tensor | None
    found: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Staged:
    """A staged landing.

    Args:
        new: float32 [N, L] on the device, to which the chain is added; None for the current anchor.
        chain: updates to add.
        sent: the merged contribution, or zeros.
        old: the current anchor on the device; only with anchors on the host.
        kept: the new anchor [P] on the host; only with anchors on the host.
    """

    new: Tensor | None
    chain: Sequence[Parts]
    sent: Parts
    old: Tensor | None = None
    kept: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """One slice of a fragment: a whole parameter, or its rows from `start` (int32 scalar on the device)."""

    part: Part
    dtype: torch.dtype
    start: Tensor | None

    @property
    def name(self) -> str:
        return self.part.entry.slice.name


class XlaFragments:
    """A `FragmentDevice` on XLA devices.

    Args:
        plan: the run's fragment plan.
        params: live parameters by name, at least those of the plan, any float dtype, sharded or not.
        config: the run's config.
        learner: this learner's config; `align`, `blend_alpha`, `error_feedback` and `anchor_device` are used here.
    """

    def __init__(
        self, plan: FragmentPlan, params: Mapping[str, Tensor], config: RunConfig, learner: LearnerConfig
    ) -> None:
        self._params = {name: params[name] for name in plan.shapes}
        self._dims = {name: sharded_dim(param) for name, param in self._params.items()}
        self._config, self._learner = config, learner
        self._wire_layouts = [plan.layout(p, config.block_size) for p in range(plan.num_fragments)]
        self._layouts = [XlaLayout(layout, self._params, config.block_size) for layout in self._wire_layouts]
        self._codecs = [XlaCodec(layout, config.wire) for layout in self._layouts]
        self._pieces = [[self._piece(part) for part in layout.parts] for layout in self._layouts]
        self._on_host = learner.anchor_device == "host"
        self._anchors: list[Tensor] = [torch.empty(0)] * plan.num_fragments  # `adopt` sets them before the first step
        self._brought: tuple[Tensor, Tensor] | None = None  # a host anchor and its copy on the device
        self._nothing = self._zeros()
        self._feeds_back = learner.align != "carry" and learner.error_feedback
        self._residuals: dict[int, Tensor] = {}  # encoding errors of merged contributions
        self._unmerged: dict[int, Tensor] = {}  # residuals of contributions that are not merged yet
        self._hidden: dict[str, Tensor] | None = None  # local values while the anchor is shown

    # --- training thread -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def adopt(self, fragment: int, values: Tensor) -> None:
        """See `FragmentDevice.adopt`."""
        anchor_NL = self._upload(fragment, values)
        self._anchors[fragment] = values.clone() if self._on_host else anchor_NL
        self._put(fragment, anchor_NL)
        self._unmerged.pop(fragment, None)
        if self._feeds_back:
            self._residuals[fragment] = self._upload(fragment, torch.zeros_like(values))

    def local_values(self, fragment: int) -> Tensor:
        """See `FragmentDevice.local_values`; correct even after `show_anchor`."""
        return self._fetch(fragment, self.local(fragment))

    @torch.no_grad()
    def local(self, fragment: int) -> Tensor:
        """Return the live parameters as float32 [N, L], without waiting for the device."""
        params: Mapping[str, Tensor] = self._params
        if self._hidden is not None:
            names = {piece.name for piece in self._pieces[fragment]}
            params = {name: upload(self._hidden[name], dim=self._dims[name])[0] for name in names}
        sync()  # excludes pending operations of a step from this graph
        local_NL = self._local(fragment, params)
        sync()
        return local_NL

    @torch.no_grad()
    def snapshot(self, fragment: int) -> Snapshot:
        """See `FragmentDevice.snapshot`."""
        wanted_NL = self._stored(fragment, self._on_device(fragment)) - self._local(fragment, self._params)
        if self._feeds_back:
            wanted_NL = wanted_NL + self._residuals[fragment]
        parts = self._codecs[fragment].encoded(wanted_NL)
        lost_NL = self._layouts[fragment].shared(wanted_NL - self._codecs[fragment].decoded(parts))
        norms = torch.stack((torch.linalg.vector_norm(wanted_NL), torch.linalg.vector_norm(lost_NL)))
        snapshot = Snapshot(fragment, parts, norms, lost_NL if self._feeds_back else None)
        del wanted_NL, lost_NL  # otherwise the sync would materialize them
        sync()
        return snapshot

    def settle(self) -> None:
        """See `FragmentDevice.settle`; does nothing, because a snapshot uses the values at trace time."""

    @torch.no_grad()
    def land(self, fragment: int, staged: Staged) -> None:
        """See `FragmentDevice.land`."""
        old_NL = self._anchors[fragment] if staged.old is None else staged.old
        new_NL = old_NL if staged.new is None else staged.new
        for update in staged.chain:
            new_NL = self._layouts[fragment].shared(new_NL + self._codecs[fragment].decoded(update))
            sync()
        self._align(fragment, old_NL, new_NL, staged.sent)
        if staged.kept is None:
            self._anchors[fragment] = new_NL
        else:
            if self._brought is None or self._brought[0] is self._anchors[fragment]:
                self._brought = (staged.kept, new_NL)
            self._anchors[fragment] = staged.kept

    @torch.no_grad()
    def show_anchor(self) -> None:
        """See `FragmentDevice.show_anchor`; the local values are saved in host memory."""
        if self._hidden is None:
            values = fetch(*(param.detach() for param in self._params.values()))
            self._hidden = dict(zip(self._params, values, strict=True))
            for p in range(len(self._layouts)):
                self._put(p, self._on_device(p))

    @torch.no_grad()
    def show_local(self) -> None:
        """See `FragmentDevice.show_local`."""
        hidden, self._hidden = self._hidden, None
        for name, values in (hidden or {}).items():
            self._params[name].copy_(upload(values, dim=self._dims[name])[0])
        sync()

    # --- link thread ---------------------------------------------------------------------------------------------

    def collect(self, snapshot: Snapshot) -> None:
        """See `FragmentDevice.collect`; with anchors on the host, also prefetches the next fragment's anchor."""
        if snapshot.found:
            return
        if self._on_host:
            self._bring((snapshot.fragment + 1) % len(self._layouts))
        snapshot.found.extend(fetch(*snapshot.parts, snapshot.norms))

    def encode(self, snapshot: Snapshot) -> Encoded:
        """See `FragmentDevice.encode`."""
        return self._encoded(snapshot, *self._fetched(snapshot))

    def _fetched(self, snapshot: Snapshot) -> list[Tensor]:
        """Take a snapshot's parts and norms on the host, once; stores the encoding error for error feedback."""
        self.collect(snapshot)
        if snapshot.lost is not None:
            self._unmerged[snapshot.fragment] = snapshot.lost
        found = list(snapshot.found)
        snapshot.found.clear()
        return found

    def _encoded(self, snapshot: Snapshot, *found: Tensor) -> Encoded:
        p, (*parts, norms) = snapshot.fragment, found
        payload = self._codecs[p].payload(tuple(parts))
        check_fragment(self._wire_layouts[p], payload, self._config.wire, self._config.block_size)
        norm, lost = norms.tolist()
        return Encoded(payload, norm, lost / norm if norm else 0.0)

    def stage(self, fragment: int, update: Update) -> Staged:
        """See `FragmentDevice.stage`. The fragment's previous update must have landed."""
        if update.full is not None:
            check_full(update.full, self._layouts[fragment].padded_numel)
        for encoded in (*update.chain, *(() if update.sent is None else (update.sent,))):
            self._decoder(fragment, encoded)
        codec = self._codecs[fragment]
        sent = self._nothing[fragment] if update.sent is None else codec.upload(update.sent)
        if self._on_host:
            kept_P = self._advanced(fragment, update)
            old_NL = self._upload(fragment, self._anchors[fragment])
            staged = Staged(self._upload(fragment, kept_P), (), sent, old_NL, kept_P)
        else:
            chain = [codec.upload(encoded) for encoded in update.chain]
            new_NL = None if update.full is None else self._upload(fragment, update.full)
            if new_NL is None and not chain:  # the current anchor, in a new buffer
                new_NL = upload(*fetch(self._anchors[fragment]), dim=0)[0]
            staged = Staged(new_NL, chain, sent)
        if update.sent is not None and fragment in self._unmerged:
            self._residuals[fragment] = self._unmerged.pop(fragment)
        return staged

    def anchor(self, fragment: int) -> Tensor:
        """See `FragmentDevice.anchor`; returns a copy."""
        anchor = self._anchors[fragment]
        return anchor.clone() if self._on_host else self._fetch(fragment, anchor)

    def _advanced(self, fragment: int, update: Update) -> Tensor:
        """Compute the new anchor on the host."""
        new_P = (self._anchors[fragment] if update.full is None else update.full).clone()
        decoded_P = torch.empty_like(new_P)
        for encoded in update.chain:
            new_P += self._decoder(fragment, encoded).read(0, decoded_P)
        return new_P

    def _decoder(self, fragment: int, encoded: Tensor) -> Decoder:
        """Return a decoder of received bytes; raises CorruptMessageError if they are invalid."""
        return Decoder(encoded, self._layouts[fragment].padded_numel, self._config.wire, self._config.block_size)

    def _bring(self, fragment: int) -> None:
        anchor_P = self._anchors[fragment]
        if self._brought is None or self._brought[0] is not anchor_P:
            self._brought = (anchor_P, self._upload(fragment, anchor_P))

    def _upload(self, fragment: int, values_P: Tensor) -> Tensor:
        return upload(self._layouts[fragment].from_wire(values_P), dim=0)[0]

    def _fetch(self, fragment: int, values_NL: Tensor) -> Tensor:
        return self._layouts[fragment].to_wire(fetch(values_NL)[0])

    # --- graphs: training thread ---------------------------------------------------------------------------------

    def _on_device(self, fragment: int) -> Tensor:
        """Return the current anchor on the device; uploads a host anchor that was not prefetched."""
        anchor, brought = self._anchors[fragment], self._brought
        if not self._on_host:
            return anchor
        return brought[1] if brought is not None and brought[0] is anchor else self._upload(fragment, anchor)

    def _local(self, fragment: int, params: Mapping[str, Tensor]) -> Tensor:
        """Return the parameters of a fragment as float32 [N, L].

        Slices of one parameter are joined first. Otherwise torch_xla would treat two graphs as equal that differ only
        in which of their inputs are the same tensor, and would run one program with the inputs of the other.
        """
        layout = self._layouts[fragment]
        groups = [
            [layout.part_of(piece.part, self._rows(piece, params[name]).float()) for piece in pieces]
            for name, pieces in groupby(self._pieces[fragment], key=lambda piece: piece.name)
        ]
        return layout.joined([parts[0] if len(parts) == 1 else layout.joined(parts) for parts in groups])

    def _stored(self, fragment: int, anchor_NL: Tensor) -> Tensor:
        """Return cast(anchor) as float32."""
        layout, pieces = self._layouts[fragment], self._pieces[fragment]
        dtypes = {piece.dtype for piece in pieces}
        if len(dtypes) == 1:
            return cast_and_back(anchor_NL, dtypes.pop())
        parts = zip(layout.split(anchor_NL), pieces, strict=True)
        return layout.joined([cast_and_back(part, piece.dtype) for part, piece in parts])

    def _align(self, fragment: int, old_NL: Tensor, new_NL: Tensor, sent: Parts) -> None:
        """Align the parameters with the new anchor, with the formulas of core/align.py."""
        layout, pieces, align = self._layouts[fragment], self._pieces[fragment], self._learner.align
        base_NL = self._stored(fragment, new_NL)
        if align == "carry":
            base_NL = base_NL + self._codecs[fragment].decoded(sent)
            old_NL = self._stored(fragment, old_NL)
        for piece, base, old in zip(pieces, layout.split(base_NL), layout.split(old_NL), strict=True):
            rows = self._rows(piece, self._params[piece.name]).float()
            new = layout.rows_of(piece.part, base)
            if align == "carry":
                new = (rows - layout.rows_of(piece.part, old)) + new
            elif align == "blend":
                alpha = self._learner.blend_alpha
                new = alpha * rows + (1 - alpha) * new
            self._write(piece, new)
        sync()

    def _put(self, fragment: int, anchor_NL: Tensor) -> None:
        """Set the parameters to cast(anchor)."""
        layout = self._layouts[fragment]
        for piece, values in zip(self._pieces[fragment], layout.split(anchor_NL), strict=True):
            self._write(piece, layout.rows_of(piece.part, values))
        sync()

    def _rows(self, piece: _Piece, param: Tensor) -> Tensor:
        return param if piece.start is None else rows_of(param, piece.start, piece.part.entry.shape[0])

    def _write(self, piece: _Piece, rows: Tensor) -> None:
        param, rows = self._params[piece.name], rows.to(piece.dtype)
        param.copy_(rows if piece.start is None else with_rows(param, rows, piece.start))

    # --- start ---------------------------------------------------------------------------------------------------

    def _piece(self, part: Part) -> _Piece:
        entry = part.entry
        param = self._params[entry.slice.name]
        is_whole = tuple(param.shape) == entry.shape
        start = None if is_whole else upload(torch.tensor(entry.slice.start_row, dtype=torch.int32))[0]
        return _Piece(part, param.dtype, start)

    def _zeros(self) -> list[Parts]:
        """Return a contribution of zeros for each fragment; fragments of the same size share one."""
        by_size: dict[tuple[int, int, int], Parts] = {}
        for layout, codec in zip(self._layouts, self._codecs, strict=True):
            size = (layout.padded_numel, layout.row_numel, layout.unit)
            if size not in by_size:
                nbytes = wire_nbytes(layout.padded_numel, self._config.wire, self._config.block_size)
                by_size[size] = codec.upload(torch.zeros(nbytes, dtype=torch.uint8))
        return [by_size[x.padded_numel, x.row_numel, x.unit] for x in self._layouts]

    def memory(self) -> str:
        """Describe the memory that anchors, residuals and exchanges take, for both values of `anchor_device`."""
        rows = [4 * layout.row_numel / 2**20 for layout in self._layouts]
        on_host = sum(4 * layout.padded_numel / 2**20 for layout in self._layouts)
        return (
            f"anchor_device={self._learner.anchor_device!r}: anchors take {sum(rows):.1f} MiB of each of "
            f"{self._layouts[0].num_devices} device(s) as 'device', {on_host:.1f} MiB of host memory as 'host'; "
            f"residuals take {sum(rows) * self._feeds_back:.1f} MiB of each device, an exchange up to "
            f"{3 * max(rows):.1f} MiB"
        )
