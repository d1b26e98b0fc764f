"""One rank's device in a learner with several ranks: what rank 0 does, all do, before anybody is told that it is done.

1. Each rank holds whole parameters and anchors, equal to those of rank 0. Each measures and encodes by itself, so that
   nothing of a contribution crosses between them: each has the part that it uploads (`partial_uploads.py`), and rank 0
   all of it. Where ranks cannot upload, rank 0 alone measures and encodes.
2. Updates go to the others as they came, with the contribution that is part of them: each rank adds alike.
3. Landings and snapshots are local. `Agreement` says when they are made, and all ranks make them in the same order
   (`make`). When the machine of rank 0 asks for them, they are there; what it leaves out has been made all the same.
4. Rank 0 calls the methods of a `FragmentDevice`; at the others, `follow` does what these tell.
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
    """A `FragmentDevice` in front of another one.

    Args:
        own: of this rank.
        ranks: of this learner.
        plan: of the run.
        config: of the run.
        boxes: what each rank holds of each parameter; empty: all of it.
        stopping: set when this rank ends.
        sender: uploads this rank's part; rank 0 has none.

    Attributes:
        landed: fragments that have landed at rank 0 alone, at the very end.
        deals: whether each rank is to upload its part of contributions.
        dealt: fragments that each rank has encoded its part of.
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
        self._ready: dict[int, _After] = {}  # by fragment, how it lands
        self._landing = threading.Lock()
        self._counts: Counter[int] = Counter()
        self._made: set[int] = set()  # landings at this boundary that the machine has not asked for yet
        self._snapshots: dict[int, tuple[int, Any]] = {}
        self.landed: list[int] = []
        self.deals, self.dealt = False, set[int]()
        self.local_values, self.anchor, self.digest = own.local_values, own.anchor, own.digest
        self.show_anchor, self.show_local = own.show_anchor, own.show_local
        self.settle = own.settle

    # --- any rank ------------------------------------------------------------------------------------------------

    def make(self, land: Sequence[int], snapshot: Sequence[int]) -> None:
        """Training thread: what was promised for this boundary.

        Ranks that send equal bytes copy at once: one could copy before, and another one after somebody changes
        parameters elsewhere than in an update.
        """
        for p in land:
            self._land(p)
        self._made = set(land)
        is_first = self._ranks.rank == 0
        if is_first:
            self._snapshots.clear()  # what the machine left out
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
        """See `FragmentDevice.adopt`; waits for the others unless they expect it."""
        if fragment in self._made or fragment in self._ready:
            self.land(fragment, None)
        else:
            self._ranks.tell({"do": "adopt", "fragment": fragment}, values.view(torch.uint8))
            self._adopt(fragment, values)

    def snapshot(self, fragment: int) -> Any:
        """See `FragmentDevice.snapshot`: the one made at this boundary."""
        return self._snapshots.pop(fragment)

    def land(self, fragment: int, staged: Any) -> None:
        """See `FragmentDevice.land`; at the very end rank 0 lands, and the others after it."""
        if fragment in self._made:
            self._made.remove(fragment)
        else:
            self._land(fragment)
            self.landed.append(fragment)

    # --- rank 0, link thread -------------------------------------------------------------------------------------

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
        """These values will be adopted at a boundary."""
        self._ranks.tell({"do": "expect", "fragment": fragment}, values.view(torch.uint8))
        self._ready[fragment] = partial(self._own.adopt, fragment, values)

    def stage(self, fragment: int, update: Update) -> Any:
        """See `FragmentDevice.stage`; what cannot be used goes to nobody."""
        staged = self._own.stage(fragment, update)
        self._ranks.tell(*packed(fragment, update))
        self._ready[fragment] = partial(self._own.land, fragment, staged)
        return staged

    def counted_anchor(self, fragment: int) -> Tensor | None:
        """The whole anchor; None: it has landed at one rank, and not yet at another one. Any thread."""
        return self._own.anchor(fragment)

    # --- another rank, link thread -------------------------------------------------------------------------------

    def follow(self, command: Json, payload: Tensor) -> _After:
        """Do what rank 0 says; returns what comes after the answer."""
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
        """All of it, of parameters equal to those of rank 0, which does the same meanwhile; keep this rank's part."""
        try:
            payload = self._own.encode(self._snapshot(p, boundary)).payload
        except NonFiniteError:
            return  # rank 0 finds the same, and tells the syncer
        assert self._sender is not None
        numel = self._plan.layout(p, self._config.block_size).padded_numel
        self._sender.keep(p, payload, numel, self._config)

    def _snapshot(self, p: int, boundary: int) -> Any:
        """The one of this boundary; training here may still be on its way to it."""
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
    """Most commands are done when they are answered."""


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
