"""The syncer's tensors: anchors, outer optimizer state, and the last published updates.

1. The state of a fragment is one immutable value (`Anchor`). A commit computes the next value and then replaces the
   current value. Transport threads therefore read without waiting and never see a part of an update, and a snapshot can
   be written while commits continue.
2. A commit is a pure function of that state, the bfloat16 outer gradient and the work of the round. The same log
   records after the same snapshot give the same bits, and therefore the same digests.
3. Steps that can fail on non-finite values (`merge`, `next_state`) run before the log record is written. The steps
   after the log record cannot fail.
4. Learners up to CHAIN_LENGTH versions behind get the updates that they miss. Other learners get the published values
   in full. A new generation begins without a chain, so all learners adopt the anchor in full.

A fragment takes 12 bytes per parameter: master, published and momentum, each float32. A commit needs as much again for
its fragment.

Shapes: _P flat padded fragment.
Source: our choice; the outer step is the paper's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Literal, cast

import torch
from torch import Tensor

from lightning_diloco.config import CHAIN_LENGTH, RunConfig
from lightning_diloco.core import native
from lightning_diloco.core.blocks import all_finite
from lightning_diloco.core.buffers import bytes_of, tensor_of
from lightning_diloco.core.digest import digest
from lightning_diloco.core.encoded import Encoded, Measured
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.merge import MergeReport, merge_fragment
from lightning_diloco.core.outer import OuterState, momentum_by_work, outer_step
from lightning_diloco.core.outer_lr import Correlation
from lightning_diloco.core.quantize import wire_nbytes
from lightning_diloco.errors import CorruptLogError, NonFiniteError, PlanMismatchError
from lightning_diloco.process.parallel import ByFragment
from lightning_diloco.storage.files import Buffer

WHOLE = (0, 1)
_TENSORS = ("master", "published", "momentum")


def fragments_of(part: tuple[int, int], num_fragments: int) -> range:
    """Return the fragments of a shard, which is given as (shard, number of shards)."""
    shard, num_shards = part
    return range(shard, num_fragments, num_shards)


@dataclass(frozen=True, eq=False)
class Anchor:
    """The state of one fragment at one version; immutable.

    Args:
        generation: increases with each restore that went back in time.
        version: number of commits.
        master: (P,) float32, the values of the outer optimizer.
        published: (P,) float32, the anchor that every learner has.
        momentum: (P,) float32.
        chain: the last published updates, uint8 [wire_nbytes] each, the newest last.
        correlation: correlation of the outer gradients, which sets `outer_lr="auto"`.
    """

    generation: int
    version: int
    master: Tensor = field(repr=False)
    published: Tensor = field(repr=False)
    momentum: Tensor = field(repr=False)
    chain: tuple[Tensor, ...] = field(repr=False)
    correlation: Correlation

    @property
    def digest(self) -> str:
        """Digest of `published`, computed once; devices compute the same digest of their anchors."""
        if (known := self.__dict__.get("_digest")) is None:  # `cached_property` of Python 3.11 has one lock for all
            known = self.__dict__["_digest"] = digest(self.published)
        return cast("str", known)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, for a snapshot; they share memory with this anchor."""
        correlation = torch.tensor(astuple(self.correlation), dtype=torch.float64)
        tensors = {name: getattr(self, name) for name in _TENSORS}
        return {**tensors, "correlation": correlation, "chain": _joined(self.chain)}


@dataclass(frozen=True, slots=True)
class Update:
    """An update that brings a learner to the current version of a fragment.

    Args:
        kind: "chain", encoded updates one after another, or "full", float32 values.
        generation: generation of the fragment.
        from_version: version from which the chain starts; for a "full" update, the same as `version`.
        version, digest: version and digest of the learner's anchor after the update.
        payload: uint8, read-only; shares memory with the store, which never changes it.
    """

    kind: Literal["chain", "full"]
    generation: int
    from_version: int
    version: int
    digest: str
    payload: memoryview


class AnchorStore:
    """Anchors and outer optimizer state of the fragments of a run, or of a shard's fragments.

    A fragment is changed by one thread at a time; all threads may read.

    Args:
        plan: the run's fragment plan.
        config: the run's config; `wire`, `block_size`, `merge`, `outer_lr` and `outer_momentum` are used here.
        part: (shard, number of shards).

    Attributes:
        layouts: layouts of all fragments of the run.
        mine: fragments that are held here.
    """

    def __init__(self, plan: FragmentPlan, config: RunConfig, part: tuple[int, int] = WHOLE) -> None:
        self.layouts = tuple(plan.layout(p, config.block_size) for p in range(plan.num_fragments))
        self.mine = fragments_of(part, plan.num_fragments)
        self.config = config
        native.warm_up(max(layout.padded_numel for layout in self.layouts))
        self._anchors: dict[int, Anchor | None] = dict.fromkeys(self.mine)
        self._hashing, self._is_hashing = threading.Lock(), False
        self._unhashed: dict[int, None] = {}  # fragments, in order

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the fragments that are held here, without chains."""
        return sum(12 * self.layouts[p].padded_numel for p in self.mine)

    @property
    def is_seeded(self) -> bool:
        """Whether every fragment has values."""
        return None not in self._anchors.values()

    def anchor(self, p: int) -> Anchor:
        """Return the current state of a seeded fragment."""
        anchor = self._anchors[p]
        assert anchor is not None, f"fragment {p} has no values yet"
        return anchor

    def seed(self, p: int, values: Tensor) -> None:
        """Set the start values of a fragment, at version 0.

        Args:
            p: the fragment.
            values: float32 [P], on the host; the store keeps this tensor, so the caller must not change it.

        Raises:
            PlanMismatchError: the values have the wrong length or dtype.
            NonFiniteError: the values contain NaN or Inf.
        """
        wanted = self.layouts[p].padded_numel
        if values.dtype != torch.float32 or values.shape != (wanted,):
            raise PlanMismatchError(
                f"start values of fragment {p} are {values.dtype} {list(values.shape)}; its plan wants "
                f"torch.float32 [{wanted}]; send them as core.layout.gather gives them"
            )
        _check_finite(values, f"the start values of fragment {p}", "start from a sound checkpoint")
        self._anchors[p] = Anchor(0, 0, values, values.clone(), torch.zeros_like(values), (), Correlation())

    def measure(self, p: int, contributions: Sequence[Tensor]) -> Measured:
        """Compute norms and cosines of encoded contributions; changes nothing."""
        config = self.config
        return Encoded(contributions, self.layouts[p].padded_numel, config.wire, config.block_size).measured(
            self.layouts[p]
        )

    def merge(
        self,
        p: int,
        contributions: Sequence[Tensor],
        shares: Sequence[float],
        max_norms: Sequence[float] | None = None,
        measured: Measured | None = None,
    ) -> tuple[Tensor, MergeReport]:
        """Merge encoded contributions to an outer gradient; changes nothing.

        Args:
            p: the fragment.
            contributions: uint8 [wire_nbytes] each, in an order that is the same on every replay.
            shares: share of each learner in the work of the fleet, see `core.merge.merge_fragment`.
            max_norms: a longer contribution is scaled down to its limit; None: no limits.
            measured: result of `measure` for these contributions; None: it is computed here.

        Returns:
            The outer gradient, bfloat16 [P], whose bytes go into the log, and statistics of the contributions.

        Raises:
            CorruptMessageError: a contribution has the wrong length or values that are not finite.
        """
        config = self.config
        return merge_fragment(
            self.layouts[p],
            contributions,
            shares,
            wire=config.wire,
            block_size=config.block_size,
            merge=config.merge,
            max_norms=max_norms,
            measured=measured,
        )

    def next_state(self, p: int, outer_gradient: Tensor, *, work: float, in_place: bool = False) -> Anchor:
        """Return the state of a fragment after one outer step; changes nothing, unless in place.

        Args:
            p: the fragment.
            outer_gradient: bfloat16 [P], from `merge` or a log record.
            work: work of the round, > 0, see `momentum_by_work`.
            in_place: reuse the memory of the current state; only if no other thread reads it.

        Raises:
            NonFiniteError: the outer gradient or the next state is not finite.
        """
        now, config = self.anchor(p), self.config
        assert outer_gradient.dtype == torch.bfloat16, f"outer gradient is {outer_gradient.dtype}"
        assert outer_gradient.shape == now.master.shape, f"{outer_gradient.shape} for {now.master.shape}"
        mu, correlation = config.outer_momentum, now.correlation
        if config.outer_lr == "auto":
            correlation = correlation.after(
                outer_gradient, now.momentum, mu=mu, work=work, block_size=config.block_size
            )
        state, update = outer_step(
            OuterState(now.master, now.momentum, now.published),
            outer_gradient,
            lr=self._outer_lr(correlation),
            momentum_coef=momentum_by_work(mu, work),
            wire=config.wire,
            block_size=config.block_size,
            in_place=in_place,
        )
        chain = (*now.chain, update)[-CHAIN_LENGTH:]
        tensors = (state.master, state.published, state.momentum, chain)
        return Anchor(now.generation, now.version + 1, *tensors, correlation)

    def outer_lr(self, state: Anchor) -> float:
        """Return the learning rate of the outer step that led to this state."""
        return self._outer_lr(state.correlation)

    def install(self, p: int, state: Anchor) -> None:
        """Make the result of `next_state` the current state, after its log record is durable."""
        now = self.anchor(p)
        assert (state.generation, state.version) == (now.generation, now.version + 1), f"{state} after {now}"
        self._anchors[p] = state

    def commit(
        self,
        p: int,
        outer_gradient: Tensor | Buffer,
        *,
        work: float,
        version: int | None = None,
        in_place: bool = False,
    ) -> None:
        """Call `next_state` and `install`, as a restart does for each log record.

        Args:
            p: the fragment.
            outer_gradient: bfloat16 [P], or its bytes.
            work: work of the round.
            version: new version according to the log record; None: not checked.
            in_place: see `next_state`.

        Raises:
            CorruptLogError: the record does not follow the current state.
        """
        present, wanted = self.anchor(p), self.layouts[p].padded_numel
        gradient = outer_gradient
        if not isinstance(gradient, Tensor):
            gradient = tensor_of(gradient, torch.bfloat16)
        if (version is not None and version != present.version + 1) or gradient.shape != (wanted,):
            raise CorruptLogError(
                f"found a commit of fragment {p} to version {version} with {gradient.numel()} values; after "
                f"{present.version} comes {present.version + 1} with {wanted}; restore log and snapshot of one moment"
            )
        self.install(p, self.next_state(p, gradient, work=work, in_place=in_place))

    def include(self, part: AnchorStore) -> None:
        """Take over the anchors of a part of the run."""
        self._anchors.update(part._anchors)

    def regenerate(self, generation: int, fragments: Iterable[int] | None = None) -> None:
        """Begin a new generation: versions continue, but all learners adopt the anchor in full.

        Args:
            generation: the new one.
            fragments: some of `mine`; None: all.
        """
        for p in self.mine if fragments is None else fragments:
            self._anchors[p] = replace(self.anchor(p), generation=generation, chain=())

    def update_for(self, p: int, have_version: int | None, *, generation: int | None = None) -> Update:
        """Return the update that a learner needs to get the current version.

        Args:
            p: the fragment.
            have_version: version that the learner has; None: it has none.
            generation: generation of that version; None: the current generation.

        Returns:
            A chain, which is empty if the learner misses no update, or the full values.
        """
        anchor = self.anchor(p)
        behind = math.inf if have_version is None else anchor.version - have_version
        if generation not in (None, anchor.generation) or not 0 <= behind <= len(anchor.chain):
            now = (anchor.version, anchor.version, anchor.digest)
            return Update("full", anchor.generation, *now, bytes_of(anchor.published))
        missing = anchor.chain[len(anchor.chain) - int(behind) :]
        start = anchor.version - len(missing)
        return Update("chain", anchor.generation, start, anchor.version, anchor.digest, bytes_of(_joined(missing)))

    def digest(self, p: int) -> str:
        """Return the digest of the published values; computed once per version."""
        return self.anchor(p).digest

    def digests(self) -> tuple[str, ...]:
        """Return the digests of all fragments that are held here; uses all cores for those that are not known."""
        with ByFragment(len(self.mine)) as threads:
            for p in self.mine:
                threads.do(p, self.digest, p)
        return tuple(self.digest(p) for p in self.mine)

    def compute_digest(self, p: int) -> None:
        """Compute a digest in the background, so that it is known when a standby takes over.

        One thread computes those of the present versions. It skips versions if they come faster.
        """
        with self._hashing:
            self._unhashed[p] = None
            if not self._is_hashing:
                self._is_hashing = True
                threading.Thread(target=self._compute_digests, name="diloco-digest").start()

    def _compute_digests(self) -> None:
        while True:
            with self._hashing:
                if not self._unhashed:
                    self._is_hashing = False
                    return
                p = next(iter(self._unhashed))
                del self._unhashed[p]
            self.digest(p)

    def freeze(
        self, fragments: Iterable[int] | None = None
    ) -> tuple[list[dict[str, int]], Iterator[tuple[str, dict[str, Tensor]]]]:
        """Return the current state for `SnapshotStore.write`; commits may continue while it is written.

        Args:
            fragments: some of `mine`; None: all.

        Returns:
            Generation and version per fragment, for the snapshot's JSON, and (stem, tensors) per fragment.
        """
        anchors = {p: self.anchor(p) for p in (self.mine if fragments is None else fragments)}
        numbers = [{"generation": anchor.generation, "version": anchor.version} for anchor in anchors.values()]
        return numbers, ((_stem(p), anchor.tensors()) for p, anchor in anchors.items())

    def restore(
        self,
        numbers: Sequence[Mapping[str, int]],
        tensors: Mapping[str, Mapping[str, Tensor]],
        *,
        do: Callable[..., object] = lambda p, call, *args, **kwargs: call(*args, **kwargs),
    ) -> None:
        """Restore the state that `freeze` returned.

        Args:
            numbers: generation and version per fragment.
            tensors: tensors of each fragment, by stem; each stem is read once.
            do: runs a call for a fragment, `do(p, call, *args, **kwargs)`, possibly in another thread.

        Raises:
            CorruptLogError: the snapshot is of another plan or wire.
        """
        if len(numbers) != len(self._anchors):
            raise _not_ours(f"{len(numbers)} fragments", f"{len(self._anchors)}")
        for p, fragment in zip(self.mine, numbers, strict=True):
            do(p, lambda p, fragment: self._load(p, tensors[_stem(p)], **fragment), p, fragment)

    def _load(self, p: int, tensors: Mapping[str, Tensor], *, generation: int, version: int) -> None:
        """Restore the state of one fragment from the result of `Anchor.tensors`.

        Raises:
            CorruptLogError: the tensors are of another plan or wire.
        """
        numel = self.layouts[p].padded_numel
        found = {name: (str(x.dtype), tuple(x.shape)) for name, x in tensors.items() if name in _TENSORS}
        if found != (wanted := dict.fromkeys(_TENSORS, ("torch.float32", (numel,)))):
            raise _not_ours(f"fragment {p} as {found}", f"{wanted}")
        size, chain = wire_nbytes(numel, self.config.wire, self.config.block_size), tensors["chain"]
        if chain.numel() % size or chain.numel() > size * CHAIN_LENGTH:
            raise _not_ours(f"a chain of {chain.numel()} bytes for fragment {p}", f"up to {CHAIN_LENGTH} times {size}")
        values = {name: tensors[name] for name in _TENSORS}
        updates = torch.split(chain, size) if chain.numel() else ()
        saved = tensors.get("correlation")  # versions without it had a fixed learning rate
        correlation = Correlation() if saved is None else Correlation(*saved.tolist())
        self._anchors[p] = Anchor(generation, version, **values, chain=updates, correlation=correlation)

    def _outer_lr(self, correlation: Correlation) -> float:
        config = self.config
        return correlation.lr(config.outer_momentum) if config.outer_lr == "auto" else config.outer_lr


def _joined(chain: Sequence[Tensor]) -> Tensor:
    if len(chain) == 1:
        return chain[0]
    return torch.cat(tuple(chain)) if chain else torch.empty(0, dtype=torch.uint8)


def _stem(p: int) -> str:
    return f"fragment-{p:04d}"


def _check_finite(x: Tensor, what: str, advice: str) -> None:
    if not all_finite(x):
        raise NonFiniteError(f"found NaN or Inf in {what}; only finite values are kept; {advice}")


def _not_ours(found: str, allowed: str) -> CorruptLogError:
    return CorruptLogError(
        f"the snapshot holds {found}; the plan of this run wants {allowed}; use the run directory of this model, or "
        f"begin a new one"
    )
