"""Fragments whose parameters lie on one XLA device.

1. The training thread traces, ends each graph with a sync, and never waits for a result. A snapshot computes and
   quantizes the pseudo-gradient on the device, so that one byte per element crosses to the host (int8).
2. The link thread moves finished tensors to the host and host tensors to the device. It traces nothing.
3. Fragments of the same shape signature share their graphs: a snapshot, an update of the anchor ("device" only), a
   landing. None has variants: a contribution that was not merged lands as one of zeros, an update over several versions
   as several updates. After every signature was exchanged once, nothing is compiled any more.
4. Anchors are never updated in place: a buffer that a graph updates is given away with it.
5. "host" anchors lie in host memory; the fragment due next is brought to the device while the one before is encoded.

Shapes: _P flat padded fragment.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.blocks import Bits, dequantize_into, num_blocks, packed_nbytes, quantize_into
from lightning_diloco.core.digest import digest
from lightning_diloco.core.fragments import Entry, FragmentPlan
from lightning_diloco.core.quantize import Decoder, check_fragment, wire_nbytes
from lightning_diloco.devices.base import Encoded, Update
from lightning_diloco.devices.dense import check_full
from lightning_diloco.devices.xla import cast_and_back, rows_of, sync, upload, with_rows

log = logging.getLogger(__name__)

Parts = tuple[Tensor, ...]  # what lies one after another on the wire: integers and scales, or floats

_BITS: dict[str, Bits] = {"int8": 8, "int4": 4}
_FLOATS = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A contribution on the device, being computed.

    Args:
        fragment: which one.
        parts: the encoded pseudo-gradient.
        norms: float32 [2], of the pseudo-gradient and of what its encoding lost.
        lost: float32 [P], what its encoding lost; None: not needed.
    """

    fragment: int
    parts: Parts
    norms: Tensor
    lost: Tensor | None


@dataclass(frozen=True, slots=True)
class Staged:
    """A landing, ready to be made.

    Args:
        new: float32 [P] on the device: what the chain is added to; None: the present anchor.
        chain: updates to add.
        sent: the merged contribution, or zeros.
        old: the present anchor on the device, where anchors lie on the host.
        kept: the new anchor on the host, likewise.
    """

    new: Tensor | None
    chain: Sequence[Parts]
    sent: Parts
    old: Tensor | None = None
    kept: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """One entry of a fragment: its whole parameter, or rows of it from `start` (int32 scalar on the device)."""

    entry: Entry
    dtype: torch.dtype
    start: Tensor | None


class XlaFragments:
    """A `FragmentDevice` on one XLA device.

    Args:
        plan: of the run.
        params: live parameters by name, at least those of the plan, any float dtype.
        config: of the run.
        learner: of this learner; `align`, `blend_alpha`, `error_feedback` and `anchor_device` count here.
    """

    def __init__(
        self, plan: FragmentPlan, params: Mapping[str, Tensor], config: RunConfig, learner: LearnerConfig
    ) -> None:
        self._params = {name: params[name] for name in plan.shapes}
        self._config, self._learner = config, learner
        self._layouts = [plan.layout(p, config.block_size) for p in range(plan.num_fragments)]
        self._pieces = [[self._piece(entry) for entry in layout.entries] for layout in self._layouts]
        self._on_host = learner.anchor_device == "host"
        self._anchors: list[Tensor] = [torch.empty(0)] * plan.num_fragments  # the run's, before the first step
        self._brought: tuple[Tensor, Tensor] | None = None  # a host anchor and its copy on the device
        self._nothing = {size: self._zeros(size) for size in {layout.padded_numel for layout in self._layouts}}
        self._feeds_back = learner.align != "carry" and learner.error_feedback
        self._residuals: dict[int, Tensor] = {}  # what encodings of merged contributions lost
        self._unmerged: dict[int, Tensor] = {}  # the residual if the outstanding contribution is merged
        self._hidden: dict[str, Tensor] | None = None  # local values while the anchor is shown
        self._say_memory()

    # --- training thread -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def adopt(self, fragment: int, values: Tensor) -> None:
        """See `FragmentDevice.adopt`."""
        (anchor_P,) = upload(values)
        self._anchors[fragment] = values.clone() if self._on_host else anchor_P
        self._put(fragment, anchor_P)
        self._unmerged.pop(fragment, None)
        if self._feeds_back:
            self._residuals[fragment] = upload(torch.zeros_like(values))[0]

    @torch.no_grad()
    def local_values(self, fragment: int) -> Tensor:
        """See `FragmentDevice.local_values`; not fooled by `show_anchor`."""
        if self._hidden is None:
            local_P = self._local(fragment, self._params)
        else:
            names = {piece.entry.slice.name for piece in self._pieces[fragment]}
            local_P = self._local(fragment, {name: upload(self._hidden[name])[0] for name in names})
        sync()
        return local_P.cpu()

    @torch.no_grad()
    def snapshot(self, fragment: int) -> Snapshot:
        """See `FragmentDevice.snapshot`."""
        wanted_P = self._stored(fragment, self._on_device(fragment)) - self._local(fragment, self._params)
        if self._feeds_back:
            wanted_P = wanted_P + self._residuals[fragment]
        parts = self._encoded(wanted_P)
        lost_P = wanted_P - self._decoded(parts, wanted_P.numel())
        norms = torch.stack((torch.linalg.vector_norm(wanted_P), torch.linalg.vector_norm(lost_P)))
        snapshot = Snapshot(fragment, parts, norms, lost_P if self._feeds_back else None)
        del wanted_P, lost_P  # or the sync would give them buffers
        sync()
        return snapshot

    @torch.no_grad()
    def land(self, fragment: int, staged: Staged) -> None:
        """See `FragmentDevice.land`."""
        old_P = self._anchors[fragment] if staged.old is None else staged.old
        new_P = old_P if staged.new is None else staged.new
        for update in staged.chain:
            new_P = new_P + self._decoded(update, new_P.numel())
            sync()
        self._align(fragment, old_P, new_P, staged.sent)
        if staged.kept is None:
            self._anchors[fragment] = new_P
        else:
            self._anchors[fragment] = staged.kept
            if self._brought is None or self._brought[0] is old_P:
                self._brought = (staged.kept, new_P)

    @torch.no_grad()
    def show_anchor(self) -> None:
        """See `FragmentDevice.show_anchor`; the local values wait in host memory."""
        if self._hidden is None:
            self._hidden = {name: param.detach().cpu() for name, param in self._params.items()}
            for p in range(len(self._layouts)):
                self._put(p, self._on_device(p))

    @torch.no_grad()
    def show_local(self) -> None:
        """See `FragmentDevice.show_local`."""
        hidden, self._hidden = self._hidden, None
        for name, values in (hidden or {}).items():
            self._params[name].copy_(upload(values)[0])
        sync()

    # --- link thread ---------------------------------------------------------------------------------------------

    def encode(self, snapshot: Snapshot) -> Encoded:
        """See `FragmentDevice.encode`."""
        p = snapshot.fragment
        payload = torch.cat([part.cpu().view(torch.uint8) for part in snapshot.parts])
        check_fragment(self._layouts[p], payload, self._config.wire, self._config.block_size)
        norm, lost = snapshot.norms.cpu().tolist()
        if snapshot.lost is not None:
            self._unmerged[p] = snapshot.lost
        if self._on_host:
            self._bring((p + 1) % len(self._layouts))
        return Encoded(payload, norm, lost / norm if norm else 0.0)

    def stage(self, fragment: int, update: Update) -> Staged:
        """See `FragmentDevice.stage`. The one before, if any, must have landed."""
        numel = self._layouts[fragment].padded_numel
        if update.full is not None:
            check_full(update.full, numel)
        for encoded in (*update.chain, *(() if update.sent is None else (update.sent,))):
            self._decoder(encoded, numel)
        sent = self._nothing[numel] if update.sent is None else self._to_device(update.sent, numel)
        if self._on_host:
            kept_P = self._advanced(fragment, update)
            old_P, new_P = upload(self._anchors[fragment], kept_P)
            staged = Staged(new_P, (), sent, old_P, kept_P)
        else:
            chain = [self._to_device(encoded, numel) for encoded in update.chain]
            full_P = update.full if update.full is not None or chain else self.anchor(fragment)
            staged = Staged(None if full_P is None else upload(full_P)[0], chain, sent)
        if update.sent is not None and fragment in self._unmerged:
            self._residuals[fragment] = self._unmerged.pop(fragment)
        return staged

    def anchor(self, fragment: int) -> Tensor:
        """See `FragmentDevice.anchor`; a copy."""
        anchor_P = self._anchors[fragment]
        return anchor_P.clone() if self._on_host else anchor_P.cpu()

    def digest(self, fragment: int) -> str:
        """SHA-256 in hex of the anchor's bytes, padding included."""
        return digest(self.anchor(fragment))

    def _advanced(self, fragment: int, update: Update) -> Tensor:
        """The new anchor, computed on the host."""
        new_P = (self._anchors[fragment] if update.full is None else update.full).clone()
        decoded_P = torch.empty_like(new_P)
        for encoded in update.chain:
            new_P += self._decoder(encoded, new_P.numel()).read(0, decoded_P)
        return new_P

    def _decoder(self, encoded: Tensor, numel: int) -> Decoder:
        """Also the check of what came: raises where anything is wrong."""
        return Decoder(encoded, numel, self._config.wire, self._config.block_size)

    def _to_device(self, encoded: Tensor, numel: int) -> Parts:
        wire, size = self._config.wire, self._config.block_size
        if (bits := _BITS.get(wire)) is None:
            return tuple(upload(encoded.clone().view(_FLOATS[wire])))
        split = packed_nbytes(numel, bits, size)
        return tuple(upload(encoded[:split].view(torch.int8), encoded[split:].clone().view(torch.bfloat16)))

    def _zeros(self, numel: int) -> Parts:
        nbytes = wire_nbytes(numel, self._config.wire, self._config.block_size)
        return self._to_device(torch.zeros(nbytes, dtype=torch.uint8), numel)

    def _bring(self, fragment: int) -> None:
        anchor_P = self._anchors[fragment]
        if self._brought is None or self._brought[0] is not anchor_P:
            self._brought = (anchor_P, upload(anchor_P)[0])

    # --- graphs: training thread ---------------------------------------------------------------------------------

    def _on_device(self, fragment: int) -> Tensor:
        """The present anchor; a host anchor that was not brought in time is brought now."""
        anchor_P, brought = self._anchors[fragment], self._brought
        if not self._on_host:
            return anchor_P
        return brought[1] if brought is not None and brought[0] is anchor_P else upload(anchor_P)[0]

    def _local(self, fragment: int, params: Mapping[str, Tensor]) -> Tensor:
        """The parameters of a fragment, float32 [P]."""
        size, flat = self._config.block_size, []
        for piece in self._pieces[fragment]:
            rows = self._rows(piece, params[piece.entry.slice.name])
            flat.append(torch.nn.functional.pad(rows.float().reshape(-1), (0, -piece.entry.numel % size)))
        return torch.cat(flat)

    def _stored(self, fragment: int, anchor_P: Tensor) -> Tensor:
        """cast(anchor) as float32."""
        pieces, size = self._pieces[fragment], self._config.block_size
        dtypes = {piece.dtype for piece in pieces}
        if len(dtypes) == 1:
            return cast_and_back(anchor_P, dtypes.pop())
        sizes = [-(-piece.entry.numel // size) * size for piece in pieces]
        cast = [cast_and_back(part, piece.dtype) for part, piece in zip(anchor_P.split(sizes), pieces, strict=True)]
        return torch.cat(cast)

    def _align(self, fragment: int, old_P: Tensor, new_P: Tensor, sent: Parts) -> None:
        """One landing; the formulas are those of core/align.py."""
        base_P = self._stored(fragment, new_P)
        if (align := self._learner.align) == "carry":
            base_P = base_P + self._decoded(sent, new_P.numel())
            old_P = self._stored(fragment, old_P)
        for piece in self._pieces[fragment]:
            rows = self._rows(piece, self._params[piece.entry.slice.name]).float()
            base = piece.entry.of(base_P).view_as(rows)
            if align == "carry":
                base = (rows - piece.entry.of(old_P).view_as(rows)) + base
            elif align == "blend":
                alpha = self._learner.blend_alpha
                base = alpha * rows + (1 - alpha) * base
            self._write(piece, base)
        sync()

    def _put(self, fragment: int, anchor_P: Tensor) -> None:
        """Parameters become cast(anchor)."""
        for piece in self._pieces[fragment]:
            self._write(piece, piece.entry.of(anchor_P).view(piece.entry.shape))
        sync()

    def _rows(self, piece: _Piece, param: Tensor) -> Tensor:
        param = param.detach()
        return param if piece.start is None else rows_of(param, piece.start, piece.entry.shape[0])

    def _write(self, piece: _Piece, rows: Tensor) -> None:
        param, rows = self._params[piece.entry.slice.name], rows.to(piece.dtype)
        param.copy_(rows if piece.start is None else with_rows(param.detach(), rows, piece.start))

    def _encoded(self, x_P: Tensor) -> Parts:
        wire, size, numel = self._config.wire, self._config.block_size, x_P.numel()
        if (bits := _BITS.get(wire)) is None:
            return (x_P.to(_FLOATS[wire]),)
        packed = torch.empty(packed_nbytes(numel, bits, size), dtype=torch.int8, device=x_P.device)
        scales = torch.empty(num_blocks(numel, size), dtype=torch.bfloat16, device=x_P.device)
        quantize_into(x_P, packed, scales, bits=bits, block_size=size)
        # The maximum of some devices passes over NaN, so that the scale would not tell.
        return packed, torch.where(torch.isfinite(x_P).view(-1, size).all(1), scales, torch.nan)

    def _decoded(self, parts: Parts, numel: int) -> Tensor:
        if (bits := _BITS.get(self._config.wire)) is None:
            return parts[0].float()
        out_P = torch.empty(numel, device=parts[0].device)
        dequantize_into(*parts, out_P, bits=bits, block_size=self._config.block_size)
        return out_P

    # --- start ---------------------------------------------------------------------------------------------------

    def _piece(self, entry: Entry) -> _Piece:
        param = self._params[entry.slice.name]
        is_whole = tuple(param.shape) == entry.shape
        start = None if is_whole else upload(torch.tensor(entry.slice.start_row, dtype=torch.int32))[0]
        return _Piece(entry, param.dtype, start)

    def _say_memory(self) -> None:
        padded = [layout.padded_numel for layout in self._layouts]
        anchors_mib, largest_mib = 4 * sum(padded) / 2**20, 4 * max(padded) / 2**20
        feedback_mib = anchors_mib if self._feeds_back else 0.0
        log.info(
            "anchors take %.1f MiB of %s memory and %.1f MiB of residuals of device memory; an exchange takes up to "
            "%.1f MiB of device memory (anchor_device=%r)",
            anchors_mib, "host" if self._on_host else "device", feedback_mib, 3 * largest_mib,
            self._learner.anchor_device,
        )  # fmt: skip
