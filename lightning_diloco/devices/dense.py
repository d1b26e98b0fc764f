"""Anchors and parameters of a learner that holds whole parameters on one device; subclasses decide when work runs.

1. A snapshot is a copy of the parameters, made before they change. At a landing the training thread makes one pass over
   the parameters; with "carry" this is usually one addition. The link thread does everything else (pseudo-gradient,
   encoding, decoding, new anchor) on its own copies.
2. Fragment-sized buffers are recycled and written to before first use, because the page faults of a fresh buffer cost
   the training thread more than the copy itself. A landing swaps buffers instead of copying them.
3. The anchor is float32, but parameters may have another dtype. All differences are taken from the value that was
   really stored, cast(anchor).
4. "carry" keeps unsent progress in the parameters. "overwrite" and "blend" discard it. With these two, error feedback
   stores the encoding error as a residual, which is committed when the contribution is merged.
5. Slices are taken from `_aliases`, never from a parameter itself, because other threads copy them during a forward.
   Indexing a parameter takes its autograd lock while holding the GIL; a forward takes the two in the opposite order
   (torch 2.13), which is a deadlock.
6. Some optimizers keep copies of a parameter. A landing also moves these copies. Otherwise they would undo it.

Shapes: _P flat padded fragment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.align import WIDE_DTYPES, land_added_, land_carry_, landing_pieces
from lightning_diloco.core.blocks import all_finite
from lightning_diloco.core.fragments import FragmentPlan, gather, scatter
from lightning_diloco.core.layout import Entry
from lightning_diloco.core.pseudogradient import pseudo_gradient, store_cast
from lightning_diloco.core.quantize import Decoder, encode_fragment
from lightning_diloco.devices.base import Encoded, Update
from lightning_diloco.errors import CorruptMessageError

_NUM_SPARE_BUFFERS = 4  # one snapshot, and base, old and new of one landing; `_take` allocates more


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A fragment's parameters at one step boundary.

    Args:
        fragment: index of the fragment.
        buffer: float32; holds the parameters after `settle`, and the pseudo-gradient after `encode`.
    """

    fragment: int
    buffer: Tensor


@dataclass(frozen=True, slots=True)
class Staged:
    """A staged landing.

    Args:
        anchor: buffer with the new anchor.
        move: buffer that `land` adds to the parameters, after `base`; None if there is nothing to add.
        base: buffer that `land` combines with the parameters as `align` requires, before it adds `move`; may be
            `anchor`. None if `move` is everything.
        old: buffer with the value stored at the last landing; may be the current anchor. None if not needed.
    """

    anchor: Tensor
    move: Tensor | None = None
    base: Tensor | None = None
    old: Tensor | None = None


class DenseFragments:
    """A `FragmentDevice` for any device that holds whole parameters.

    Args:
        plan: the run's fragment plan.
        params: live parameters by name, at least those of the plan, all on one device, any float dtype. Each
            parameter is looked up at every use, because an inner strategy may replace its memory.
        config: the run's config.
        learner: this learner's config; `align`, `blend_alpha` and `error_feedback` are used here.

    Attributes:
        copies_of: returns the copies of a parameter, by its name, that must move with it; each has the parameter's
            shape. Training thread.
    """

    def __init__(
        self, plan: FragmentPlan, params: Mapping[str, Tensor], config: RunConfig, learner: LearnerConfig
    ) -> None:
        self.copies_of: Callable[[str], Sequence[Tensor]] = lambda name: ()
        self._params, self._names = params, tuple(plan.shapes)
        self._config, self._learner = config, learner
        self._layouts = [plan.layout(p, config.block_size) for p in range(plan.num_fragments)]
        self._dtypes = [[self._params[e.slice.name].dtype for e in layout.entries] for layout in self._layouts]
        self._casts = [any(dtype not in WIDE_DTYPES for dtype in dtypes) for dtypes in self._dtypes]
        self._is_double = [all(dtype == torch.float64 for dtype in dtypes) for dtypes in self._dtypes]
        self._device = params[self._names[0]].device
        # All buffers have the same size, so that any of them can hold any fragment.
        self._buffer_numel = max(layout.padded_numel for layout in self._layouts)
        self._spare = deque(self._new_buffer() for _ in range(_NUM_SPARE_BUFFERS))
        self._anchors = [self._new_buffer() for _ in self._layouts]
        self._residuals: dict[int, Tensor] = {}  # encoding errors of merged contributions
        self._unmerged: dict[int, Tensor] = {}  # residuals of contributions that are not merged yet
        self._hidden: dict[str, Tensor] | None = None  # local values while the anchor is shown
        self._hidden_copies: list[tuple[Tensor, Tensor]] = []  # (copy, its local value) while the anchor is shown

    # --- training thread -----------------------------------------------------------------------------------------

    def adopt(self, fragment: int, values: Tensor) -> None:
        """See `FragmentDevice.adopt`."""
        self.settle()
        self._flat(fragment, self._anchors[fragment]).copy_(values)
        views = self._views(fragment)
        with self._copies_follow(views):
            for entry, param in views:
                value = entry.of(values).view(entry.shape).to(param.device)
                # A float64 parameter that rounds to this float32 value keeps its extra precision.
                is_it = param.float() == value if param.dtype == torch.float64 else None
                param.copy_(value if is_it is None else torch.where(is_it, param, value))
        self._residuals.pop(fragment, None)
        self._unmerged.pop(fragment, None)
        self._mark()

    def local_values(self, fragment: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """See `FragmentDevice.local_values`. Any dtype is possible here. Correct even after `show_anchor`."""
        layout = self._layouts[fragment]
        params = self._aliases(fragment) if self._hidden is None else self._hidden
        return gather(layout, params, torch.empty(layout.padded_numel, dtype=dtype))

    def snapshot(self, fragment: int) -> Snapshot:
        """See `FragmentDevice.snapshot`."""
        buffer = self._take()
        self._copy_params(fragment, self._flat(fragment, buffer))
        self._mark()
        return Snapshot(fragment, buffer)

    def settle(self) -> None:
        """See `FragmentDevice.settle`."""

    def land(self, fragment: int, staged: Staged) -> None:
        """See `FragmentDevice.land`."""
        views = self._views(fragment)
        with self._copies_follow(views):
            if staged.base is not None:
                for entry, view in views:
                    self._align(view, entry, staged)
            if (move := staged.move) is not None:
                land_added_([view for _, view in views], [entry.of(move).view(entry.shape) for entry, _ in views])
        before, self._anchors[fragment] = self._anchors[fragment], staged.anchor
        self._mark()
        used = {id(buffer): buffer for buffer in (before, staged.move, staged.base, staged.old) if buffer is not None}
        used.pop(id(staged.anchor), None)
        self._spare.extend(used.values())

    def show_anchor(self) -> None:
        """See `FragmentDevice.show_anchor`."""
        if self._hidden is None:
            self.settle()
            self._hidden = {name: self._params[name].detach().clone() for name in self._names}
            self._hidden_copies = [(copy, copy.clone()) for name in self._names for copy in self.copies_of(name)]
            for p, layout in enumerate(self._layouts):
                with self._copies_follow(self._views(p)):
                    scatter(layout, self._flat(p, self._anchors[p]), self._params)

    def show_local(self) -> None:
        """See `FragmentDevice.show_local`."""
        hidden, self._hidden = self._hidden, None
        with torch.no_grad():
            for name, values in (hidden or {}).items():
                self._params[name].copy_(values)
            for copy, values in self._hidden_copies:
                copy.copy_(values)
        self._hidden_copies = []

    # --- link thread ---------------------------------------------------------------------------------------------

    def collect(self, snapshot: Snapshot) -> None:
        """See `FragmentDevice.collect`."""

    def encode(self, snapshot: Snapshot) -> Encoded:
        """See `FragmentDevice.encode`."""
        p = snapshot.fragment
        with self._aside():
            self.settle()
            scratch, wanted_P = self._take(), self._flat(p, snapshot.buffer)
            anchor = self._anchors[p]
            stored_P = self._stored(p, anchor, scratch) if self._casts[p] else self._flat(p, anchor)
            pseudo_gradient(stored_P, wanted_P, out=wanted_P)
            if p in self._residuals:
                wanted_P.add_(self._flat(p, self._residuals[p]))
            payload = encode_fragment(self._layouts[p], wanted_P, self._config.wire, self._config.block_size)
            norm = float(torch.linalg.vector_norm(wanted_P))
            lost_P = self._add_decoded(payload, wanted_P, sign=-1)
            lost = float(torch.linalg.vector_norm(lost_P))
            payload = self._to_host(payload)
        self._spare.append(scratch)
        if self._learner.align != "carry" and self._learner.error_feedback:
            self._replace(self._unmerged, p, snapshot.buffer)
        else:
            self._spare.append(snapshot.buffer)
        return Encoded(payload, norm, lost / norm if norm else 0.0)

    def stage(self, fragment: int, update: Update) -> Staged:
        """See `FragmentDevice.stage`. The fragment's previous update must have landed."""
        with self._aside():
            if self._is_one_addition(fragment, update):
                staged = self._added(fragment, update)
            else:
                anchor, sent, move = self._new_anchor(fragment, update), update.sent, None
                if sent is not None and self._is_double[fragment] and self._learner.align == "carry":
                    move = self._take()  # separate: float32 cannot hold the sum of anchor and contribution
                    self._add_decoded(self._from_host(sent), self._flat(fragment, move).zero_())
                    sent = None
                base, old = self._base_and_old(fragment, anchor, sent)
                staged = Staged(anchor, move=move, base=base, old=old)
        if update.sent is not None and fragment in self._unmerged:
            self._replace(self._residuals, fragment, self._unmerged.pop(fragment))
        return staged

    def anchor(self, fragment: int) -> Tensor:
        """See `FragmentDevice.anchor`; returns a copy."""
        with self._aside():
            return self._flat(fragment, self._anchors[fragment]).to("cpu", copy=True)

    def _is_one_addition(self, fragment: int, update: Update) -> bool:
        once = update.full is None and len(update.chain) == 1
        is_plain = not self._casts[fragment] and not self._is_double[fragment]
        return once and self._learner.align == "carry" and is_plain

    def _added(self, fragment: int, update: Update) -> Staged:
        """Stage an update that is a single addition: rule 3 of `core/align.py`."""
        anchor, move = self._take(), self._take()
        move_P = self._flat(fragment, move).zero_()
        self._add_decoded(self._from_host(update.chain[0]), move_P)
        torch.add(self._flat(fragment, self._anchors[fragment]), move_P, out=self._flat(fragment, anchor))
        if update.sent is not None:
            self._add_decoded(self._from_host(update.sent), move_P)
        return Staged(anchor, move=move)

    def _new_anchor(self, fragment: int, update: Update) -> Tensor:
        buffer = self._take()
        new_P = self._flat(fragment, buffer)
        if update.full is not None:
            check_full(update.full, new_P.numel())
            new_P.copy_(update.full)
        else:
            new_P.copy_(self._flat(fragment, self._anchors[fragment]))
        for encoded in update.chain:
            self._add_decoded(self._from_host(encoded), new_P)
        return buffer

    def _base_and_old(self, fragment: int, anchor: Tensor, sent: Tensor | None) -> tuple[Tensor, Tensor | None]:
        align, casts = self._learner.align, self._casts[fragment]
        if align == "overwrite":
            return anchor, None
        if align == "blend":
            base = self._take()
            self._stored(fragment, anchor, base).mul_(1 - self._learner.blend_alpha)
            return base, None
        base = anchor
        if casts or sent is not None:
            base = self._take()
            base_P = self._stored(fragment, anchor, base)
            if sent is not None:
                self._add_decoded(self._from_host(sent), base_P)
        old = self._anchors[fragment]
        if casts:
            old = self._take()
            self._stored(fragment, self._anchors[fragment], old)
        return base, old

    def _stored(self, fragment: int, anchor: Tensor, out: Tensor) -> Tensor:
        """Write cast(anchor), as float32, to the buffer `out`."""
        anchor_P, out_P = self._flat(fragment, anchor), self._flat(fragment, out)
        return store_cast(self._layouts[fragment], anchor_P, self._dtypes[fragment], out_P)

    def _add_decoded(self, encoded: Tensor, out_P: Tensor, sign: int = 1) -> Tensor:
        """Decode a payload chunk by chunk and add `sign` times its values to `out_P`."""
        return Decoder(encoded, out_P.numel(), self._config.wire, self._config.block_size).add_to(out_P, sign=sign)

    # --- hooks for subclasses ------------------------------------------------------------------------------------

    def _copy_params(self, fragment: int, out_P: Tensor) -> None:
        """Copy the parameters now, or schedule copies that `settle` finishes. Training thread."""
        gather(self._layouts[fragment], self._params, out_P)

    def _mark(self) -> None:
        """Order the link thread's next work after everything enqueued so far. Training thread."""

    def _aside(self) -> AbstractContextManager[object]:
        """Return a context for work that must not delay training; the work is finished on exit. Link thread."""
        return nullcontext()

    def _to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def _from_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def _aliases(self, fragment: int) -> dict[str, Tensor]:
        """Return a fragment's parameters, detached from autograd (rule 5)."""
        names = dict.fromkeys(entry.slice.name for entry in self._layouts[fragment].entries)
        return {name: self._params[name].detach() for name in names}

    def _views(self, fragment: int) -> list[tuple[Entry, Tensor]]:
        """Return the slices of a fragment, each with its view of the parameter."""
        params = self._aliases(fragment)
        return [(entry, entry.slice.of(params[entry.slice.name])) for entry in self._layouts[fragment].entries]

    @contextmanager
    def _copies_follow(self, views: Sequence[tuple[Entry, Tensor]]) -> Iterator[None]:
        """Apply to the copies of these parameter views the change that the views undergo inside the context."""
        moved = [(e.slice.of(copy), view) for e, view in views for copy in self.copies_of(e.slice.name)]
        with torch.no_grad():
            for copy, view in moved:
                copy.sub_(view)
            yield
            for copy, view in moved:
                copy.add_(view)

    def _align(self, param: Tensor, entry: Entry, staged: Staged) -> None:
        """Align a parameter, or some of its rows, in one pass; any memory format."""
        assert staged.base is not None
        base = entry.of(staged.base)
        view = param if param.is_contiguous() else param.contiguous()
        if self._learner.align == "carry":
            assert staged.old is not None
            land_carry_(view, base, entry.of(staged.old))
        elif self._learner.align == "overwrite":
            view.copy_(base.view_as(view))
        else:
            self._land_blend_(view.view(-1), base)
        if view is not param:
            param.copy_(view)

    def _land_blend_(self, param: Tensor, base: Tensor) -> None:
        """param <- cast(alpha * param + base)."""
        for part, mixed in landing_pieces(param):
            mixed.copy_(param[part]).mul_(self._learner.blend_alpha).add_(base[part])
            param[part].copy_(mixed)

    # --- buffers -------------------------------------------------------------------------------------------------

    def _flat(self, fragment: int, buffer: Tensor) -> Tensor:
        return buffer[: self._layouts[fragment].padded_numel]

    def _new_buffer(self) -> Tensor:
        return torch.empty(self._buffer_numel, dtype=torch.float32, device=self._device).zero_()

    def _take(self) -> Tensor:
        try:
            return self._spare.pop()
        except IndexError:
            return self._new_buffer()

    def _replace(self, held: dict[int, Tensor], fragment: int, buffer: Tensor) -> None:
        if (before := held.pop(fragment, None)) is not None:
            self._spare.append(before)
        held[fragment] = buffer


def check_full(values: Tensor, numel: int) -> None:
    """Check received values of a whole fragment.

    Raises:
        CorruptMessageError: the values have the wrong dtype or length, or contain NaN or Inf.
    """
    if values.dtype != torch.float32 or values.shape != (numel,) or not all_finite(values):
        raise CorruptMessageError(
            f"received a full fragment as {values.dtype} of shape {tuple(values.shape)}: expected {numel} finite "
            "float32 values; the message was discarded and may be sent again"
        )
