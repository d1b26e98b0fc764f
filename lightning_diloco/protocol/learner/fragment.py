"""One fragment at a learner: its token ranges, its one contribution, its updates, and when these are asked for.

The counter of a learner is cut, per fragment, into ranges:

    merged and landed, or discarded | outstanding (at most one) | fresh: [fresh_from, now)

1. A snapshot turns the fresh range into the outstanding one. With "carry" the two touch; an overwriting landing drops
   the fresh range, so that there may be a gap, which is booked.
2. `pending` is the outstanding and the fresh range; nothing else of the counter is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_diloco.protocol.actions import Fetch, LearnerAction, Say, Upload
from lightning_diloco.protocol.events import Staged
from lightning_diloco.protocol.learner.leases import LeaseHolder
from lightning_diloco.protocol.messages import AskFate, Ready

ASK_AGAIN_S = 3.0
ASK_AGAIN_IF_HELD_S = 30.0


@dataclass(slots=True)
class Outstanding:
    """A contribution whose fate has not landed yet.

    Args:
        is_encoded: its payload exists.
        is_uploading: the payload is on its way; no use in asking for its fate.
        is_held: the syncer has it; only a lost message could keep its fate from us.
        merged_at: the version it became part of, once that is known.
        asked_s: when its fate was last asked.
        began_s: when it was snapshotted.
        was_uploaded: the payload was through once.
    """

    ready: Ready
    is_encoded: bool = False
    is_uploading: bool = False
    is_held: bool = False
    merged_at: int | None = None
    asked_s: float = float("-inf")
    began_s: float = 0.0
    was_uploaded: bool = False

    def upload(self) -> list[LearnerAction]:
        """Send the payload (again), once it exists."""
        if not self.is_encoded or self.is_uploading:
            return []
        self.is_uploading, self.is_held = True, False
        return [Upload(self.ready)]

    def ask_fate(self, now_s: float, *, at_once: bool = False) -> list[LearnerAction]:
        """Ask what became of it, if that may be known, and was not asked just now."""
        if not self.is_encoded or self.is_uploading or self.merged_at is not None:
            return []
        if not at_once and now_s - self.asked_s < (ASK_AGAIN_IF_HELD_S if self.is_held else ASK_AGAIN_S):
            return []
        self.asked_s = now_s
        return [Say(AskFate(self.ready.fragment, self.ready.seq))]


@dataclass(slots=True)
class Fragment:
    """One fragment at one learner.

    Args:
        generation, landed, proof: the anchor it has, and the proof that it was published.
        offered: newest version it has heard of.
        fresh_from, fresh_step: token counter and step from which nothing has been snapshotted.
        snapshot_step: step of the last snapshot.
        seq: number of the last contribution.
        merged_tokens: size of the ranges whose merge has landed.
        staged: an update that lands at the next boundary.
        is_fetching: an update is on its way; `fetches_to_adopt` says with which intention.
        must_adopt: the anchor is to be taken over as it is, and the progress dropped for this cause.
        is_due: its schedule asks for a round.
        announced: round that waits for my snapshot.
        last_round: newest round heard of.
    """

    generation: int
    landed: int
    offered: int
    fresh_from: int = 0
    fresh_step: int = 0
    snapshot_step: int = 0
    seq: int = 0
    merged_tokens: int = 0
    outstanding: Outstanding | None = None
    staged: Staged | None = None
    is_fetching: bool = False
    fetches_to_adopt: bool = False
    must_adopt: Literal["refused", "restored"] | None = None
    is_due: bool = False
    announced: int | None = None
    last_round: int = -1
    proof: str = ""

    def pending(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """The ranges that are neither landed as merged nor discarded."""
        ranges = [(self.outstanding.ready.start, self.outstanding.ready.stop)] if self.outstanding else []
        if self.fresh_from < tokens:
            ranges.append((self.fresh_from, tokens))
        return tuple(ranges)

    @property
    def can_land(self) -> bool:
        """Whether an update may land now: not while a delta is measured against the anchor it replaces."""
        return self.staged is not None and (self.outstanding is None or self.outstanding.is_encoded)

    @property
    def may_snapshot(self) -> bool:
        """Whether its round may find it without a contribution at the next boundary, after what lands there."""
        return self.announced is not None and (self.outstanding is None or self.can_land)

    def wants_round(self, tokens: int) -> bool:
        """Whether there is something that only a round can bring on."""
        if self.must_adopt:
            return False
        return self.fresh_from < tokens if self.outstanding is None else self.outstanding.merged_at is None

    def is_drained(self, tokens: int) -> bool:
        return (
            self.outstanding is None
            and self.fresh_from >= tokens
            and self.landed >= self.offered
            and self.must_adopt is None
        )

    def snapshot(self, p: int, step: int, tokens: int, lessee: LeaseHolder, now_s: float) -> Ready:
        """The fresh range becomes a contribution."""
        spans, repeats = lessee.between(self.fresh_from, tokens)
        self.seq += 1
        ready = Ready(
            fragment=p,
            seq=self.seq,
            base=self.landed,
            generation=self.generation,
            start=self.fresh_from,
            stop=tokens,
            steps=step - self.fresh_step,
            spans=spans,
            repeats=repeats,
        )
        self.outstanding = Outstanding(ready, began_s=now_s)
        self.fresh_from, self.fresh_step, self.snapshot_step = tokens, step, step
        return ready

    def ask_fate(self, now_s: float, *, at_once: bool = False) -> list[LearnerAction]:
        """See `Outstanding.ask_fate`."""
        return self.outstanding.ask_fate(now_s, at_once=at_once) if self.outstanding else []

    def fetch(self, p: int) -> list[LearnerAction]:
        """Ask for the update that is offered, or for the anchor to adopt; one at a time."""
        if self.is_fetching or self.staged or not (self.must_adopt or self.offered > self.landed):
            return []
        self.is_fetching, self.fetches_to_adopt = True, self.must_adopt is not None
        seq = self.outstanding.ready.seq if self.outstanding else None
        return [Fetch(p, self.generation, self.landed, seq, self.fetches_to_adopt)]

    def stage(self, update: Staged, generation: int) -> None:
        """Take an update that fits; what does not is fetched anew at the next tick."""
        self.is_fetching = False
        if update.generation != generation or (self.must_adopt is not None) != self.fetches_to_adopt:
            return
        if update.version <= self.landed and not self.must_adopt:
            return
        mine = self.outstanding
        contains_mine = mine is not None and mine.merged_at is not None and mine.merged_at <= update.version
        if mine and contains_mine and update.merged_seq != mine.ready.seq:
            return  # landing it would leave my contribution in the parameters, so it would be sent twice
        self.staged = update
        self.offered = max(self.offered, update.version)

    def drop_outstanding(self) -> int:
        """Forget the contribution; returns its tokens."""
        tokens = self.outstanding.ready.tokens if self.outstanding else 0
        self.outstanding = None
        return tokens

    def take_back(self, kept: float = 0.0) -> None:
        """What was not merged of the contribution is fresh again: its values are still in the parameters.

        Args:
            kept: the part of it that was merged, 0..1.
        """
        assert self.outstanding is not None
        ready, self.outstanding = self.outstanding.ready, None
        assert ready.stop == self.fresh_from, "only touching ranges can be joined again"
        self.fresh_from, self.fresh_step = ready.stop_if(kept), self.fresh_step - ready.steps + int(ready.steps * kept)

    def drop_fresh(self, step: int, tokens: int) -> int:
        """The fresh range is gone from the parameters; returns its tokens."""
        dropped = tokens - self.fresh_from
        self.fresh_from, self.fresh_step = tokens, step
        return dropped

    def rolled_back(self, version: int, merged: int) -> int:
        """The run fell back to this version, with so many of my tokens merged; returns the tokens that are lost.

        What had landed as merged, or was outstanding, and is not merged there, is gone with the old generation.
        """
        lost = self.merged_tokens + self.drop_outstanding() - merged
        self.merged_tokens, self.landed, self.offered = merged, version, version
        self.staged, self.announced, self.must_adopt = None, None, "restored"
        return lost
