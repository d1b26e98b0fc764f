"""Fragments over the XLA devices of several hosts, as one program: what each host sends of them.

1. Every host runs the same graphs in the same order, or all wait for ever: who calls these methods sees to it. Nothing
   here waits for a graph on the training thread once training has begun.
2. What comes in is whole, on every host: each uploads the rows of its own devices. What goes out, (R,), is these rows.
3. One host puts contributions together. They were encoded where they lie: about one byte for each element crosses to
   its host, and from there to the first one.

Shapes: _NL devices x elements, _R what one host holds of it, flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.devices.base import Encoded
from lightning_diloco.devices.xla import fetch, own_rows
from lightning_diloco.devices.xla_fragments import Snapshot, XlaFragments


class XlaHostFragments(XlaFragments):
    """One host's part; see `XlaFragments` for the arguments.

    Attributes:
        rows_of_hosts: which rows of [N, L] are on each host; the first one is told.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._own_rows = own_rows()
        self.rows_of_hosts: Sequence[Sequence[int]] = [self._own_rows]

    # --- any host ------------------------------------------------------------------------------------------------

    def anchor(self, fragment: int) -> Tensor:
        """This host's rows of the anchor, float32 (R,); threads as `FragmentDevice.anchor`."""
        anchor = self._anchors[fragment]
        return self._own(self._layouts[fragment].from_wire(anchor)) if self._on_host else self.rows(anchor)

    def delta(self, snapshot: Snapshot) -> Tensor:
        """This host's rows of an encoded contribution, as uint8 (R,). Link thread."""
        *parts, _ = self._fetched(snapshot)
        return torch.cat([self._own(part).view(torch.uint8) for part in parts])

    def rows(self, values_NL: Tensor) -> Tensor:
        """This host's rows of what lies on the devices, (R,); waits for it."""
        return self._own(fetch(values_NL)[0])

    def _fetch(self, fragment: int, values_NL: Tensor) -> Tensor:
        return self.rows(values_NL)

    def _own(self, values_NL: Tensor) -> Tensor:
        return values_NL[self._own_rows].view(-1)

    # --- the first host ------------------------------------------------------------------------------------------

    def numels(self, fragment: int) -> list[int]:
        """R of float32 values, by host."""
        return [len(rows) * self._layouts[fragment].row_numel for rows in self.rows_of_hosts]

    def sizes(self, snapshot: Snapshot) -> list[int]:
        """Bytes of a contribution, by host."""
        per_row = sum(part.shape[1] * part.itemsize for part in snapshot.parts)
        return [len(rows) * per_row for rows in self.rows_of_hosts]

    def whole(self, fragment: int, found: Sequence[Tensor]) -> Tensor:
        """A whole fragment, float32 [P], of what all hosts hold."""
        return self._layouts[fragment].to_wire(self._joined(found, self._layouts[fragment].row_numel))

    def encoded(self, snapshot: Snapshot, found: Sequence[Tensor]) -> Encoded:
        """A contribution of all hosts' `delta`. Link thread."""
        rest, parts = list(found), list[Tensor]()
        for part in snapshot.parts:
            per_row = part.shape[1] * part.itemsize
            sizes = [len(rows) * per_row for rows in self.rows_of_hosts]
            mine = [each[:size].clone() for each, size in zip(rest, sizes, strict=True)]  # aligned
            rest = [each[size:] for each, size in zip(rest, sizes, strict=True)]
            parts.append(self._joined([each.view(part.dtype) for each in mine], part.shape[1]))
        return self._encoded(snapshot, *parts, *fetch(snapshot.norms))

    def _joined(self, found: Sequence[Tensor], width: int) -> Tensor:
        """[N, width] of all hosts' rows."""
        out = found[0].new_empty(sum(map(len, self.rows_of_hosts)), width)
        for rows, values in zip(self.rows_of_hosts, found, strict=True):
            out[list(rows)] = values.view(-1, width)
        return out
