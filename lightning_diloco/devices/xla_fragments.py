"""Fragments whose parameters lie on one XLA device, or on several as one program (SPMD).

1. The training thread traces, ends each graph with a sync, and never waits for a result. A snapshot computes and
   quantizes the pseudo-gradient on the device, so that one byte per element crosses to the host (int8).
2. The link thread moves finished tensors to the host and host tensors to the device. It traces nothing.
3. Fragments of the same shape signature share their graphs: a snapshot, an update of the anchor ("device" only), a
   landing. None has variants: a contribution that was not merged lands as one of zeros, an update over several versions
   as several updates. After every signature was exchanged once, nothing is compiled any more. Plans of 12B decoders
   have 3 signatures (Gemma) or 4 (Mistral): 9 or 12 graphs, 6 or 8 with "host".
4. Anchors are never updated in place: a buffer that a graph updates is given away with it.
5. "host" anchors lie in host memory; the fragment due next is brought to the device while the one before is collected.
6. On several devices each has its part of everything here, in the order of xla_layout.py.

Shapes: _P flat padded fragment on the host, _NL devices x elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.digest import digest
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import Decoder, check_fragment, wire_nbytes
from lightning_diloco.devices.base import Encoded, Update
from lightning_diloco.devices.dense import check_full
from lightning_diloco.devices.xla import cast_and_back, fetch, rows_of, sharded_dim, sync, upload, with_rows
from lightning_diloco.devices.xla_codec import Parts, XlaCodec
from lightning_diloco.devices.xla_layout import Part, XlaLayout


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A contribution on the device, being computed.

    Args:
        fragment: which one.
        parts: the encoded pseudo-gradient.
        norms: float32 [2], of the pseudo-gradient and of what its encoding lost.
        lost: float32 [N, L], what its encoding lost; None: not needed.
        found: parts and norms on the host, once they are there.
    """

    fragment: int
    parts: Parts
    norms: Tensor
    lost: Tensor | None
    found: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Staged:
    """A landing, ready to be made.

    Args:
        new: float32 [N, L] on the device: what the chain is added to; None: the present anchor.
        chain: updates to add.
        sent: the merged contribution, or zeros.
        old: the present anchor on the device, where anchors lie on the host.
        kept: the new anchor on the host [P], likewise.
    """

    new: Tensor | None
    chain: Sequence[Parts]
    sent: Parts
    old: Tensor | None = None
    kept: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """One slice of a fragment: its whole parameter, or rows of it from `start` (int32 scalar on the device)."""

    part: Part
    dtype: torch.dtype
    start: Tensor | None

    @property
    def name(self) -> str:
        return self.part.entry.slice.name


class XlaFragments:
    """A `FragmentDevice` on XLA devices.

    Args:
        plan: of the run.
        params: live parameters by name, at least those of the plan, any float dtype, sharded or not.
        config: of the run.
        learner: of this learner; `align`, `blend_alpha`, `error_feedback` and `anchor_device` count here.
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
        self._anchors: list[Tensor] = [torch.empty(0)] * plan.num_fragments  # the run's, before the first step
        self._brought: tuple[Tensor, Tensor] | None = None  # a host anchor and its copy on the device
        self._nothing = self._zeros()
        self._feeds_back = learner.align != "carry" and learner.error_feedback
        self._residuals: dict[int, Tensor] = {}  # what encodings of merged contributions lost
        self._unmerged: dict[int, Tensor] = {}  # the residual if the outstanding contribution is merged
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
        """See `FragmentDevice.local_values`; not fooled by `show_anchor`."""
        return self._fetch(fragment, self.local(fragment))

    @torch.no_grad()
    def local(self, fragment: int) -> Tensor:
        """The live parameters as float32 [N, L], being computed."""
        params: Mapping[str, Tensor] = self._params
        if self._hidden is not None:
            names = {piece.name for piece in self._pieces[fragment]}
            params = {name: upload(self._hidden[name], dim=self._dims[name])[0] for name in names}
        sync()  # what a step left to be traced is no part of this graph
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
        del wanted_NL, lost_NL  # or the sync would give them buffers
        sync()
        return snapshot

    def settle(self) -> None:
        """See `FragmentDevice.settle`: a snapshot is computed from what parameters were when it was traced."""

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
        """See `FragmentDevice.show_anchor`; the local values wait in host memory."""
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
        """See `FragmentDevice.collect`; the host may be some steps ahead of what the device computes."""
        if snapshot.found:
            return
        if self._on_host:
            self._bring((snapshot.fragment + 1) % len(self._layouts))
        snapshot.found.extend(fetch(*snapshot.parts, snapshot.norms))

    def encode(self, snapshot: Snapshot) -> Encoded:
        """See `FragmentDevice.encode`."""
        return self._encoded(snapshot, *self._fetched(snapshot))

    def _fetched(self, snapshot: Snapshot) -> list[Tensor]:
        """Its parts and norms on the host, for who asks first to keep; what encoding lost is kept here."""
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
        """See `FragmentDevice.stage`. The one before, if any, must have landed."""
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
            if new_NL is None and not chain:  # the present anchor, in a buffer of its own
                new_NL = upload(*fetch(self._anchors[fragment]), dim=0)[0]
            staged = Staged(new_NL, chain, sent)
        if update.sent is not None and fragment in self._unmerged:
            self._residuals[fragment] = self._unmerged.pop(fragment)
        return staged

    def anchor(self, fragment: int) -> Tensor:
        """See `FragmentDevice.anchor`; a copy."""
        anchor = self._anchors[fragment]
        return anchor.clone() if self._on_host else self._fetch(fragment, anchor)

    def digest(self, fragment: int) -> str:
        """SHA-256 in hex of the anchor's bytes, padding included."""
        return digest(self.anchor(fragment))

    def _advanced(self, fragment: int, update: Update) -> Tensor:
        """The new anchor, computed on the host."""
        new_P = (self._anchors[fragment] if update.full is None else update.full).clone()
        decoded_P = torch.empty_like(new_P)
        for encoded in update.chain:
            new_P += self._decoder(fragment, encoded).read(0, decoded_P)
        return new_P

    def _decoder(self, fragment: int, encoded: Tensor) -> Decoder:
        """Also the check of what came: raises where anything is wrong."""
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
        """The present anchor; a host anchor that was not brought in time is brought now."""
        anchor, brought = self._anchors[fragment], self._brought
        if not self._on_host:
            return anchor
        return brought[1] if brought is not None and brought[0] is anchor else self._upload(fragment, anchor)

    def _local(self, fragment: int, params: Mapping[str, Tensor]) -> Tensor:
        """The parameters of a fragment, float32 [N, L].

        Slices of one parameter are joined first. torch_xla takes graphs for the same that differ only in which of
        their inputs are the same tensor, and would hand the program of one the inputs of the other.
        """
        layout = self._layouts[fragment]
        groups = [
            [layout.part_of(piece.part, self._rows(piece, params[name]).float()) for piece in pieces]
            for name, pieces in groupby(self._pieces[fragment], key=lambda piece: piece.name)
        ]
        return layout.joined([parts[0] if len(parts) == 1 else layout.joined(parts) for parts in groups])

    def _stored(self, fragment: int, anchor_NL: Tensor) -> Tensor:
        """cast(anchor) as float32."""
        layout, pieces = self._layouts[fragment], self._pieces[fragment]
        dtypes = {piece.dtype for piece in pieces}
        if len(dtypes) == 1:
            return cast_and_back(anchor_NL, dtypes.pop())
        parts = zip(layout.split(anchor_NL), pieces, strict=True)
        return layout.joined([cast_and_back(part, piece.dtype) for part, piece in parts])

    def _align(self, fragment: int, old_NL: Tensor, new_NL: Tensor, sent: Parts) -> None:
        """One landing; the formulas are those of core/align.py."""
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
        """Parameters become cast(anchor)."""
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
        """A contribution of zeros for each fragment; one for all of a size."""
        by_size: dict[tuple[int, int, int], Parts] = {}
        for layout, codec in zip(self._layouts, self._codecs, strict=True):
            size = (layout.padded_numel, layout.row_numel, layout.unit)
            if size not in by_size:
                nbytes = wire_nbytes(layout.padded_numel, self._config.wire, self._config.block_size)
                by_size[size] = codec.upload(torch.zeros(nbytes, dtype=torch.uint8))
        return [by_size[x.padded_numel, x.row_numel, x.unit] for x in self._layouts]

    def memory(self) -> str:
        """What anchors take, here and if they lay elsewhere, as a sentence."""
        rows = [4 * layout.row_numel / 2**20 for layout in self._layouts]
        on_host = sum(4 * layout.padded_numel / 2**20 for layout in self._layouts)
        return (
            f"anchor_device={self._learner.anchor_device!r}: anchors take {sum(rows):.1f} MiB of each of "
            f"{self._layouts[0].num_devices} device(s) as 'device', {on_host:.1f} MiB of host memory as 'host'; "
            f"residuals take {sum(rows) * self._feeds_back:.1f} MiB of each device, an exchange up to "
            f"{3 * max(rows):.1f} MiB"
        )
