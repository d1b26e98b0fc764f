"""One fragment at a learner: its token ranges, its contribution and its updates.

Per fragment, the learner's token counter is divided into ranges:

    merged and landed, or discarded | outstanding (at most one) | fresh: [fresh_from, now)

1. A snapshot turns the fresh range into the outstanding one. With "carry" the two ranges touch. Other landing rules
   drop the fresh range, which leaves a gap that is booked as discarded.
2. Exactly the outstanding and the fresh range are pending.
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
        ready: its description.
        is_encoded: the payload exists.
        is_uploading: the payload is being sent, so its fate cannot be known yet.
        is_held: the syncer has the payload, and will send its fate.
        merged_at: version into which it was merged, if that is known.
        asked_s: when the learner last asked for its fate.
        began_s: when the snapshot was taken.
        was_uploaded: the payload has been sent completely at least once.
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
        """Send the payload, or send it again, if it exists."""
        if not self.is_encoded or self.is_uploading:
            return []
        self.is_uploading, self.is_held = True, False
        return [Upload(self.ready)]

    def ask_fate(self, now_s: float, *, at_once: bool = False) -> list[LearnerAction]:
        """Ask for its fate, if it can be known and the last request is not too recent."""
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
        generation, landed, proof: generation and version of this learner's anchor, and the proof of its publication.
        offered: newest version that the syncer has offered.
        fresh_from, fresh_step: token counter and step at the start of the fresh range.
        snapshot_step: step of the last snapshot.
        seq: number of the last contribution.
        merged_tokens: total size of the ranges whose merge has landed.
        staged: update that lands at the next boundary.
        is_fetching: an update is being fetched.
        fetches_to_adopt: the update that is being fetched will replace the parameters.
        must_adopt: the next update replaces the parameters; their progress is discarded for this cause.
        is_due: the schedule asks for a round.
        intent_s: when the last intent was created.
        announced: round that waits for this learner's snapshot.
        last_round: newest round announced.
        outlived: version of this learner's anchor, if its generation has ended and the next one is not adopted yet.
        answered_with_old: newest round that was answered with a contribution from before its announcement.
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
    intent_s: float = float("-inf")
    announced: int | None = None
    last_round: int = -1
    outlived: int | None = None
    answered_with_old: int | None = None
    proof: str = ""

    @property
    def held(self) -> int:
        """Version of this learner's anchor, which `proof` proves."""
        return self.landed if self.outlived is None else self.outlived

    def pending(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges that are neither merged and landed nor discarded, up to `tokens`."""
        fresh = ((self.fresh_from, tokens),) if self.fresh_from < tokens else ()
        if self.outstanding is None:
            return fresh
        return ((self.outstanding.ready.start, self.outstanding.ready.stop), *fresh)

    @property
    def can_land(self) -> bool:
        """Whether an update may land now. It must not replace an anchor while a pseudo-gradient is computed from it."""
        return self.staged is not None and (self.outstanding is None or self.outstanding.is_encoded)

    @property
    def may_snapshot(self) -> bool:
        """Whether a snapshot may be taken at the next boundary, after its landings."""
        return self.announced is not None and (self.outstanding is None or self.can_land)

    def wants_round(self, tokens: int) -> bool:
        """Return whether there are tokens that need another round."""
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
        """Turn the fresh range into the outstanding contribution; returns its description."""
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
        """Fetch the offered update, or the anchor to adopt; one at a time."""
        if self.is_fetching or self.staged or not (self.must_adopt or self.offered > self.landed):
            return []
        self.is_fetching, self.fetches_to_adopt = True, self.must_adopt is not None
        seq = self.outstanding.ready.seq if self.outstanding else None
        return [Fetch(p, self.generation, self.landed, seq, self.fetches_to_adopt)]

    def stage(self, update: Staged, generation: int) -> None:
        """Stage a fetched update if it still fits; otherwise the next tick fetches again."""
        self.is_fetching = False
        if update.generation != generation or (self.must_adopt is not None) != self.fetches_to_adopt:
            return
        if update.version <= self.landed and not self.must_adopt:
            return
        mine = self.outstanding
        contains_mine = mine is not None and mine.merged_at is not None and mine.merged_at <= update.version
        if mine and contains_mine and update.merged_seq != mine.ready.seq:
            return  # it would land without subtracting the merged contribution, which would be sent twice
        self.staged = update
        self.offered = max(self.offered, update.version)

    def drop_outstanding(self) -> int:
        """Drop the outstanding contribution; returns its tokens."""
        tokens = self.outstanding.ready.tokens if self.outstanding else 0
        self.outstanding = None
        return tokens

    def take_back(self, kept: float = 0.0) -> None:
        """Make the unmerged part of the contribution fresh again; its values are still in the parameters.

        Args:
            kept: merged part of the contribution, 0..1.
        """
        assert self.outstanding is not None
        ready, self.outstanding = self.outstanding.ready, None
        assert ready.stop == self.fresh_from, "only touching ranges can be joined again"
        self.fresh_from, self.fresh_step = ready.stop_if(kept), self.fresh_step - ready.steps + int(ready.steps * kept)

    def drop_fresh(self, step: int, tokens: int) -> int:
        """Drop the fresh range, which is no longer in the parameters; returns its tokens."""
        dropped = tokens - self.fresh_from
        self.fresh_from, self.fresh_step = tokens, step
        return dropped

    def ended_at(self, generation: int, version: int, proof: str) -> None:
        """Note the final anchor, which the last learner takes after it has left."""
        self.generation, self.landed, self.offered, self.proof = generation, version, version, proof

    def welcomed_back(self, version: int) -> None:
        """Forget offers and merges that have not landed, because a restored syncer may have lost them.

        Args:
            version: the syncer's current version of this generation.
        """
        self.offered = max(self.landed, version)
        if self.staged is not None and self.staged.version > version:
            self.staged = None
        if self.outstanding is not None:
            self.outstanding.merged_at = None  # asked again

    def rolled_back(self, version: int, merged: int) -> int:
        """Fall back to a version of a new generation.

        Args:
            version: version of the new generation.
            merged: tokens of this learner that are merged in it.

        Returns:
            Lost tokens: tokens that had landed as merged or were outstanding, minus `merged`. It is negative if an
            earlier generation had lost tokens that are in this one.
        """
        lost = self.merged_tokens + self.drop_outstanding() - merged
        self.outlived = self.held
        self.merged_tokens, self.landed, self.offered = merged, version, version
        self.staged, self.announced, self.must_adopt = None, None, "restored"
        self.fetches_to_adopt = False  # an update on its way may be of an earlier start of the generation
        return lost
