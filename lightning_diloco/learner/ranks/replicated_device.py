"""One rank's device in a learner with several ranks: all ranks carry out the operations of rank 0's device.

1. Each rank holds whole parameters and anchors, equal to those of rank 0. Each rank computes and encodes the
   pseudo-gradient itself, so no part of a contribution crosses between ranks. Each rank has the part that it uploads
   (`partial_uploads.py`), and rank 0 has the whole contribution. If the ranks cannot upload, only rank 0 encodes.
2. Rank 0 sends updates to the other ranks as it received them, with the learner's contribution if it is part of the
   update. So all ranks make the same additions. An update counts as staged when all ranks have staged it.
3. Landings and snapshots are local. `Agreement` lists them for each boundary, and all ranks make them in the same order
   (`make`), before the protocol machine on rank 0 asks for them. If the machine skips a snapshot, it is discarded.
4. Rank 0 calls the methods of a `FragmentDevice`. They send commands to the other ranks, which carry them out in
   `follow`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import Encoded, FragmentDevice, Update
from lightning_diloco.errors import DiLoCoError, NonFiniteError
from lightning_diloco.learner.ranks.group import Ranks
from lightning_diloco.learner.ranks.partial_uploads import PartSender
from lightning_diloco.protocol.codec import Json

WAIT_S = 0.002
_After = Callable[[], object]


class ReplicatedDevice:
    """A `FragmentDevice` in front of a rank's own device.

    Args:
        own: device of this rank.
        ranks: the ranks of this learner.
        plan: fragment plan of the run.
        config: options of the run.
        boxes: for each rank, its box of each parameter; empty: each rank holds whole parameters.
        stopping: set when this rank ends.
        sender: uploads this rank's part; rank 0 has none.

    Attributes:
        landed: fragments that have landed only on rank 0, after training.
        deals: whether each rank encodes and uploads its part of contributions.
        dealt: fragments of which each rank has encoded its part.
    """

    _are_equal = True  # whether ranks hold equal parameters

    def __init__(
        self,
        own: FragmentDevice[Any, Any],
        ranks: Ranks,
        *,
        plan: FragmentPlan,
        config: RunConfig,
        boxes: Sequence[Mapping[str, Any]],
        stopping: threading.Event,
        sender: PartSender | None = None,
    ) -> None:
        self._own, self._ranks, self._plan, self._config = own, ranks, plan, config
        self._stopping, self._sender = stopping, sender
        self._ready: dict[int, _After] = {}  # by fragment: call that lands it
        self._landing = threading.Lock()
        self._counts: Counter[int] = Counter()
        self._made: set[int] = set()  # landings at this boundary that the machine has not asked for yet
        self._snapshots: dict[int, tuple[int, Any]] = {}
        self.landed: list[int] = []
        self.deals, self.dealt = False, set[int]()
        self.local_values, self.anchor = own.local_values, own.anchor
        self.show_anchor, self.show_local = own.show_anchor, own.show_local
        self.settle = own.settle

    # --- any rank ------------------------------------------------------------------------------------------------

    def make(self, land: Sequence[int], snapshot: Sequence[int]) -> None:
        """Make the landings and snapshots that rank 0 has promised for this boundary. Training thread.

        Ranks with equal parameters copy the snapshots at once, because all must encode equal values. If they copied
        later and a script changed parameters outside the optimizer, one rank could copy before the change and another
        rank after it.
        """
        for p in land:
            self._land(p)
        self._made = set(land)
        is_first = self._ranks.rank == 0
        if is_first:
            self._snapshots.clear()  # those that the machine has skipped
        if is_first or self.deals or not self._are_equal:
            self._snapshots |= {p: (self._ranks.num_begun, self._own.snapshot(p)) for p in snapshot}
            if self._are_equal:
                self._own.settle()

    def _land(self, p: int) -> None:
        with self._landing:
            self._ready.pop(p)()
            self._counts[p] += 1

    def _adopt(self, p: int, values: Tensor) -> None:
        self._own.adopt(p, values)
        self._counts[p] += 1

    # --- rank 0, training thread ---------------------------------------------------------------------------------

    def adopt(self, fragment: int, values: Tensor) -> None:
        """See `FragmentDevice.adopt`. Waits for the other ranks, unless they already have the values (`expect`)."""
        if fragment in self._made or fragment in self._ready:
            self.land(fragment, None)
        else:
            self._ranks.tell({"do": "adopt", "fragment": fragment}, values.view(torch.uint8))
            self._adopt(fragment, values)

    def snapshot(self, fragment: int) -> Any:
        """See `FragmentDevice.snapshot`. Returns the one that `make` has taken at this boundary."""
        return self._snapshots.pop(fragment)

    def land(self, fragment: int, staged: Any) -> None:
        """See `FragmentDevice.land`. After training, rank 0 lands first, and the other ranks land later."""
        if fragment in self._made:
            self._made.remove(fragment)
        else:
            self._land(fragment)
            self.landed.append(fragment)

    # --- rank 0, link thread -------------------------------------------------------------------------------------

    def collect(self, snapshot: Any) -> None:
        """See `FragmentDevice.collect`. Waits only for rank 0's device; those of the other ranks are about as far."""
        _, own = snapshot
        self._own.collect(own)

    def encode(self, snapshot: Any) -> Encoded:
        """See `FragmentDevice.encode`. Tells the other ranks to encode, too, and does not wait for them."""
        boundary, own = snapshot
        if self.deals:
            self._ranks.tell({"do": "encode", "fragment": own.fragment, "boundary": boundary})
            self.dealt.add(own.fragment)
        return self._own.encode(own)

    def expect(self, fragment: int, values: Tensor) -> None:
        """Send the other ranks values that will be adopted at a boundary."""
        self._ranks.tell({"do": "expect", "fragment": fragment}, values.view(torch.uint8))
        self._ready[fragment] = partial(self._own.adopt, fragment, values)

    def stage(self, fragment: int, update: Update) -> Any:
        """See `FragmentDevice.stage`. The other ranks stage the update after rank 0 has found it usable."""
        staged = self._own.stage(fragment, update)
        self._ranks.tell(*packed(fragment, update))
        self._ready[fragment] = partial(self._own.land, fragment, staged)
        return staged

    def counted_anchor(self, fragment: int) -> Tensor | None:
        """Return the whole anchor; None if the last update has not landed on all ranks yet. Any thread."""
        return self._own.anchor(fragment)

    # --- another rank, link thread -------------------------------------------------------------------------------

    def follow(self, command: Json, payload: Tensor) -> _After:
        """Carry out a command of rank 0; returns a call to make after the answer."""
        p = command["fragment"]
        match command["do"]:
            case "adopt":
                self._adopt(p, payload.view(torch.float32))
            case "expect":
                self._ready[p] = partial(self._own.adopt, p, payload.view(torch.float32))
            case "stage":
                self._ready[p] = partial(self._own.land, p, self._own.stage(p, unpacked(command, payload)))
            case "encode":
                return partial(self._encode_part, p, command["boundary"])
            case unknown:
                raise AssertionError(f"rank 0 says {unknown}")
        return _nothing

    def _encode_part(self, p: int, boundary: int) -> None:
        """Encode the whole fragment, as rank 0 does at the same time from equal parameters; keep this rank's part."""
        try:
            payload = self._own.encode(self._snapshot(p, boundary)).payload
        except NonFiniteError:
            return  # rank 0 gets the same error, and tells the syncer
        assert self._sender is not None
        numel = self._plan.layout(p, self._config.block_size).padded_numel
        self._sender.keep(p, payload, numel, self._config)

    def _snapshot(self, p: int, boundary: int) -> Any:
        """Return the snapshot of this boundary; waits if training on this rank has not reached the boundary yet."""
        while (found := self._snapshots.get(p, (0, None)))[0] < boundary:
            if self._stopping.wait(WAIT_S):
                raise DiLoCoError("this rank ends before the snapshot that rank 0 asks for; nothing is to be done")
        if found[0] > boundary:
            raise DiLoCoError(
                f"rank 0 asks for fragment {p} as it was at step boundary {boundary}, and this rank has taken it again "
                f"at {found[0]} since; start the learner again"
            )
        return found[1]


def _nothing() -> None:
    """Do nothing after the answer."""


def packed(fragment: int, update: Update) -> tuple[Json, Tensor]:
    """Return the command to stage this update, and its payload."""
    parts = [*update.chain]
    parts += [] if update.sent is None else [update.sent]
    parts += [] if update.full is None else [update.full.view(torch.uint8)]
    sizes = [part.numel() for part in parts]
    kinds: Json = {"has_sent": update.sent is not None, "has_full": update.full is not None}
    payload = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    return {"do": "stage", "fragment": fragment, "sizes": sizes, **kinds}, payload


def unpacked(command: Json, payload: Tensor) -> Update:
    """Return the update of a command and its payload; the inverse of `packed`."""
    parts = list(torch.split(payload, command["sizes"])) if command["sizes"] else []
    full = parts.pop().clone().view(torch.float32) if command["has_full"] else None
    sent = parts.pop() if command["has_sent"] else None
    return Update(full, tuple(parts), sent)
