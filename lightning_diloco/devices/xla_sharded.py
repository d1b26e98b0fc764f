"""Fragments whose parameters are sharded over the devices of one process (SPMD).

1. Anchors, encoding and decoding are on the host, as for parameters in host memory; only copies of rows cross.
2. A snapshot copies rows, sharded like their parameter; the link thread reads them shard by shard. What lands is
   uploaded shard by shard. Nothing is gathered on a device, and no graph is made for it.
3. Where rows lie in a parameter is part of the graphs here: each fragment has one for snapshots and one for landings.
   After every fragment was exchanged once, nothing is compiled any more.

Shapes: _P flat padded fragment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import Entry, FragmentPlan
from lightning_diloco.devices import dense
from lightning_diloco.devices.base import Encoded, Update
from lightning_diloco.devices.xla import local_shards, shard, sharded_dim, sync, upload_sharded


@dataclass(frozen=True, slots=True)
class ShardedSnapshot:
    """Copies of a fragment's rows on the devices, in the order of its entries."""

    fragment: int
    rows: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class ShardedStaged:
    """A landing, ready to be made: as in dense.py, `base` and `old` on the devices, in the order of the entries."""

    anchor: Tensor
    base: Sequence[Tensor]
    old: Sequence[Tensor]


class ShardedXlaFragments(dense.DenseFragments):
    """A `FragmentDevice` on the devices of one SPMD process; see `DenseFragments` for its arguments."""

    def __init__(
        self, plan: FragmentPlan, params: Mapping[str, Tensor], config: RunConfig, learner: LearnerConfig
    ) -> None:
        stand_ins = {name: torch.empty((), dtype=params[name].dtype).expand(plan.shapes[name]) for name in plan.shapes}
        super().__init__(plan, stand_ins, config, learner)
        self._live = {name: params[name] for name in plan.shapes}
        self._dims = {name: sharded_dim(param) for name, param in self._live.items()}

    # --- training thread -----------------------------------------------------------------------------------------

    def adopt(self, fragment: int, values: Tensor) -> None:
        """See `FragmentDevice.adopt`."""
        self._flat(fragment, self._anchors[fragment]).copy_(values)
        self._put(fragment, values)
        self._residuals.pop(fragment, None)
        self._unmerged.pop(fragment, None)

    def local_values(self, fragment: int) -> Tensor:
        """See `FragmentDevice.local_values`; not fooled by `show_anchor`."""
        if self._hidden is None:
            return self._fetched(self.snapshot(fragment), torch.zeros(self._layouts[fragment].padded_numel))
        return super().local_values(fragment)

    def snapshot(self, fragment: int) -> ShardedSnapshot:  # type: ignore[override]
        """See `FragmentDevice.snapshot`."""
        rows = []
        with torch.no_grad():
            for entry in self._layouts[fragment].entries:
                rows.append(entry.slice.of(self._live[entry.slice.name].detach()).clone())
                shard(rows[-1], self._dims[entry.slice.name])
        sync()
        return ShardedSnapshot(fragment, rows)

    def land(self, fragment: int, staged: ShardedStaged) -> None:  # type: ignore[override]
        """See `FragmentDevice.land`; the formulas are those of core/align.py."""
        for k, entry in enumerate(self._layouts[fragment].entries):
            rows = entry.slice.of(self._live[entry.slice.name].detach()).float()
            new = staged.base[k]
            if self._learner.align == "carry":
                new = (rows - staged.old[k]) + new
            elif self._learner.align == "blend":
                new = self._learner.blend_alpha * rows + new
            self._write(entry, new)
        sync()
        self._spare.append(self._anchors[fragment])
        self._anchors[fragment] = staged.anchor

    def show_anchor(self) -> None:
        """See `FragmentDevice.show_anchor`; the local values wait in host memory."""
        if self._hidden is None:
            self._hidden = {
                name: local_shards(param.detach(), torch.empty(param.shape, dtype=param.dtype))
                for name, param in self._live.items()
            }
            for p, anchor in enumerate(self._anchors):
                self._put(p, anchor)

    def show_local(self) -> None:
        """See `FragmentDevice.show_local`."""
        hidden, self._hidden = self._hidden, None
        with torch.no_grad():
            for name, values in (hidden or {}).items():
                self._live[name].copy_(upload_sharded(values, self._dims[name]))
        sync()

    # --- link thread ---------------------------------------------------------------------------------------------

    def encode(self, snapshot: ShardedSnapshot) -> Encoded:  # type: ignore[override]
        """See `FragmentDevice.encode`."""
        buffer = self._take()
        self._fetched(snapshot, self._flat(snapshot.fragment, buffer))
        return super().encode(dense.Snapshot(snapshot.fragment, buffer))

    def stage(self, fragment: int, update: Update) -> ShardedStaged:  # type: ignore[override]
        """See `FragmentDevice.stage`. The one before, if any, must have landed."""
        staged = super().stage(fragment, update)
        base = self._uploaded(fragment, staged.base)
        old = [] if staged.old is None else self._uploaded(fragment, staged.old)
        for buffer in (staged.base, staged.old):  # the devices have copies
            if buffer is not None and buffer is not staged.anchor and buffer is not self._anchors[fragment]:
                self._spare.append(buffer)
        return ShardedStaged(staged.anchor, base, old)

    def _fetched(self, snapshot: ShardedSnapshot, out_P: Tensor) -> Tensor:
        out_P.zero_()  # also the padding
        for entry, rows in zip(self._layouts[snapshot.fragment].entries, snapshot.rows, strict=True):
            local_shards(rows, entry.of(out_P).view(entry.shape))
        return out_P

    def _uploaded(self, fragment: int, buffer: Tensor) -> list[Tensor]:
        """Of copies: a transfer may still read what the next landing overwrites."""
        return [
            upload_sharded(entry.of(buffer).view(entry.shape).clone(), self._dims[entry.slice.name])
            for entry in self._layouts[fragment].entries
        ]

    # --- graphs: training thread ---------------------------------------------------------------------------------

    def _put(self, fragment: int, values: Tensor) -> None:
        """Parameters become these values."""
        for entry, rows in zip(self._layouts[fragment].entries, self._uploaded(fragment, values), strict=True):
            self._write(entry, rows)
        sync()

    def _write(self, entry: Entry, rows: Tensor) -> None:
        param = self._live[entry.slice.name]
        with torch.no_grad():
            entry.slice.of(param).copy_(rows.to(param.dtype))
