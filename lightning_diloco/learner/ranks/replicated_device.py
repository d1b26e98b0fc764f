"""The device of rank 0: what it stages, all ranks stage, before anybody is told that it is staged.

1. Each rank holds whole parameters and anchors, equal to those of rank 0. Each measures and encodes by itself, so that
   nothing of a contribution crosses between them: each has the part that it uploads (`partial_uploads.py`), and rank 0
   all of it. Where ranks cannot upload, rank 0 alone measures and encodes.
2. Updates go to the others as they came, with the contribution that is part of them: each rank adds alike.
3. Landings and snapshots are local. When they are made, `Agreement` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.devices.base import Encoded, FragmentDevice, Update
from lightning_diloco.learner.ranks.group import Ranks
from lightning_diloco.protocol.codec import Json


class ReplicatedDevice:
    """A `FragmentDevice` in front of another one.

    Args:
        own: of this rank.
        ranks: of this learner.

    Attributes:
        landed: fragments that have landed since this was cleared last.
        counts: how often each fragment has landed or was adopted.
        deals: whether each rank is to upload its part of contributions.
        dealt: fragments that each rank has encoded its part of.
    """

    def __init__(self, own: FragmentDevice[Any, Any], ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._expected: set[int] = set()
        self.landed: list[int] = []
        self.counts: Counter[int] = Counter()
        self.deals, self.dealt = False, set[int]()
        self.local_values, self.anchor, self.digest = own.local_values, own.anchor, own.digest
        self.show_anchor, self.show_local = own.show_anchor, own.show_local
        self.settle = own.settle

    # --- training thread -----------------------------------------------------------------------------------------

    def make(self, land: Sequence[int], snapshot: Sequence[int]) -> None:
        """What was promised for this boundary, before the machine asks for it; here nothing is done before that."""

    def adopt(self, fragment: int, values: Tensor) -> None:
        """See `FragmentDevice.adopt`; waits for the others unless they expect it."""
        if fragment in self._expected:
            self._expected.remove(fragment)
            self.landed.append(fragment)
        else:
            self._ranks.tell({"do": "adopt", "fragment": fragment}, values.view(torch.uint8))
        self._own.adopt(fragment, values)
        self.counts[fragment] += 1

    def snapshot(self, fragment: int) -> Any:
        """See `FragmentDevice.snapshot`; the others take theirs at the same boundary, and encode the same bytes.

        So it is settled here: one rank could copy before, and another after somebody changes parameters elsewhere than
        in an update.
        """
        snapshot = self._own.snapshot(fragment)
        self._own.settle()
        return self._ranks.num_begun, snapshot

    def land(self, fragment: int, staged: Any) -> None:
        """See `FragmentDevice.land`."""
        self._own.land(fragment, staged)
        self.landed.append(fragment)
        self.counts[fragment] += 1

    # --- link thread ---------------------------------------------------------------------------------------------

    def collect(self, snapshot: Any) -> None:
        """See `FragmentDevice.collect`; devices of the others have come about as far."""
        _, own = snapshot
        self._own.collect(own)

    def encode(self, snapshot: Any) -> Encoded:
        """See `FragmentDevice.encode`; the others begin when told, and are not waited for."""
        boundary, own = snapshot
        if self.deals:
            self._ranks.tell({"do": "encode", "fragment": own.fragment, "boundary": boundary})
            self.dealt.add(own.fragment)
        return self._own.encode(own)

    def expect(self, fragment: int, values: Tensor) -> None:
        """See `FragmentDevice.expect`."""
        self._ranks.tell({"do": "expect", "fragment": fragment}, values.view(torch.uint8))
        self._expected.add(fragment)

    def stage(self, fragment: int, update: Update) -> Any:
        """See `FragmentDevice.stage`; what cannot be used goes to nobody."""
        staged = self._own.stage(fragment, update)
        self._ranks.tell(*packed(fragment, update))
        return staged


def packed(fragment: int, update: Update) -> tuple[Json, Tensor]:
    """The command to stage this update, and its payload."""
    parts = [*update.chain]
    parts += [] if update.sent is None else [update.sent]
    parts += [] if update.full is None else [update.full.view(torch.uint8)]
    sizes = [part.numel() for part in parts]
    kinds: Json = {"has_sent": update.sent is not None, "has_full": update.full is not None}
    payload = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    return {"do": "stage", "fragment": fragment, "sizes": sizes, **kinds}, payload


def unpacked(command: Json, payload: Tensor) -> Update:
    """The inverse of `packed`."""
    parts = list(torch.split(payload, command["sizes"])) if command["sizes"] else []
    full = parts.pop().clone().view(torch.float32) if command["has_full"] else None
    sent = parts.pop() if command["has_sent"] else None
    return Update(full, tuple(parts), sent)
