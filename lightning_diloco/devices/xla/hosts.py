"""Fragments that one SPMD program shards over the XLA devices of several hosts.

1. Every host must run the same graphs in the same order. Otherwise all hosts hang. The callers ensure this. After
   training has started, no method here makes the training thread wait for a graph.
2. Inputs are whole fragments on every host; each host uploads the rows of its own devices. Outputs, (R,), are the rows
   of one host.
3. The first host assembles contributions. The devices encode them, so about one byte per element is copied to each
   host and sent on to the first one.

Shapes: _NL devices x elements, _R one host's rows, flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.devices.base import Encoded
from lightning_diloco.devices.xla.fragments import Snapshot, XlaFragments
from lightning_diloco.devices.xla.ops import fetch, own_rows


class XlaHostFragments(XlaFragments):
    """One host's part of the fragments; see `XlaFragments` for the arguments.

    Attributes:
        rows_of_hosts: the rows of [N, L] on each host. The caller sets it on the first host.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._own_rows = own_rows()
        self.rows_of_hosts: Sequence[Sequence[int]] = [self._own_rows]

    # --- any host ------------------------------------------------------------------------------------------------

    def anchor(self, fragment: int) -> Tensor:
        """Return this host's rows of the anchor, float32 (R,); same threads as `FragmentDevice.anchor`."""
        anchor = self._anchors[fragment]
        return self._own(self._layouts[fragment].from_wire(anchor)) if self._on_host else self.rows(anchor)

    def delta(self, snapshot: Snapshot) -> Tensor:
        """Return this host's rows of an encoded contribution as uint8 (R,). Link thread."""
        *parts, _ = self._fetched(snapshot)
        return torch.cat([self._own(part).view(torch.uint8) for part in parts])

    def rows(self, values_NL: Tensor) -> Tensor:
        """Return this host's rows, (R,), of a tensor on the devices; waits for them."""
        return self._own(fetch(values_NL)[0])

    def _fetch(self, fragment: int, values_NL: Tensor) -> Tensor:
        return self.rows(values_NL)

    def _own(self, values_NL: Tensor) -> Tensor:
        return values_NL[self._own_rows].view(-1)

    # --- the first host ------------------------------------------------------------------------------------------

    def numels(self, fragment: int) -> list[int]:
        """Return the number of float32 values R of each host."""
        return [len(rows) * self._layouts[fragment].row_numel for rows in self.rows_of_hosts]

    def sizes(self, snapshot: Snapshot) -> list[int]:
        """Return the number of bytes of a contribution on each host."""
        per_row = sum(part.shape[1] * part.itemsize for part in snapshot.parts)
        return [len(rows) * per_row for rows in self.rows_of_hosts]

    def whole(self, fragment: int, found: Sequence[Tensor]) -> Tensor:
        """Assemble a whole fragment, float32 [P], from the rows of all hosts."""
        return self._layouts[fragment].to_wire(self._joined(found, self._layouts[fragment].row_numel))

    def encoded(self, snapshot: Snapshot, found: Sequence[Tensor]) -> Encoded:
        """Assemble a contribution from the `delta` of all hosts. Link thread."""
        rest, parts = list(found), list[Tensor]()
        for part in snapshot.parts:
            per_row = part.shape[1] * part.itemsize
            sizes = [len(rows) * per_row for rows in self.rows_of_hosts]
            mine = [each[:size].clone() for each, size in zip(rest, sizes, strict=True)]  # clone aligns them
            rest = [each[size:] for each, size in zip(rest, sizes, strict=True)]
            parts.append(self._joined([each.view(part.dtype) for each in mine], part.shape[1]))
        return self._encoded(snapshot, *parts, *fetch(snapshot.norms))

    def _joined(self, found: Sequence[Tensor], width: int) -> Tensor:
        """Join the rows of all hosts to [N, width]."""
        out = found[0].new_empty(sum(map(len, self.rows_of_hosts)), width)
        for rows, values in zip(self.rows_of_hosts, found, strict=True):
            out[list(rows)] = values.view(-1, width)
        return out
