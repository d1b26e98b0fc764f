"""A learner's data leases, and the tokens trained on each.

1. The learner requests leases ahead, so that training seldom waits: enough for AHEAD_S at the current pace and for two
   batches. If a quarter of them is missing, it asks at once.
2. If the syncer gives no lease, the training thread reads without a lease. These tokens count as repeated when they are
   merged.
3. A contribution names the leases that its tokens were trained on. If the syncer no longer lists a lease as this
   learner's, its tokens count as repeated; if the range is done, none of its tokens are sent again.
4. Leases arrive in the order of their numbers, and no number is taken twice. Older epochs are read first.

Source: our choice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from msgspec.structs import replace

from lightning_diloco.protocol.data_ranges import Catalogue, Lease, Piece, Span
from lightning_diloco.protocol.limits import MAX_LEASES
from lightning_diloco.protocol.messages import AskRanges, Leases

AHEAD_S = 30.0
MIN_AHEAD, MAX_AHEAD = 4, 128
ASK_AGAIN_S = 1.0
REPORT_S = 5.0

Ranges = tuple[tuple[int, int], ...]


class LeaseHolder:
    """The data leases of one process.

    Args:
        drops: the landing rule drops tokens.

    Attributes:
        num_repeated: tokens trained on without a lease.
        was_denied: whether the syncer had no lease to give when it was asked last.
    """

    def __init__(self, *, drops: bool) -> None:
        self.catalogue: Catalogue | None = None
        self.num_repeated = 0
        self.was_denied = False
        self._drops = drops
        self._unread: deque[Lease] = deque()
        self._spans: dict[int, Span] = {}
        self._repeats: deque[tuple[int, int]] = deque(maxlen=1000)
        self._highest = 0
        self._range_tokens = 0
        self._least = MIN_AHEAD
        self._asked_s = float("-inf")
        self._asked_for = 0
        self._ahead = MIN_AHEAD
        self._waits_for_answer = False

    # ---------------------------------------------------------------------------------------------- training thread

    def take(self) -> Lease | None:
        """Take the next range to read; None if there is none."""
        if not self._unread:
            return None
        lease = self._unread.popleft()
        if not self._unread:  # ask once more
            self.was_denied = False
        self._spans[lease.number] = Span(lease.number, 0, 0, 0)
        return lease

    def need(self, num_ranges: int) -> None:
        """Keep enough leases for two batches, of `num_ranges` ranges each."""
        self._least = max(self._least, min(MAX_AHEAD, 2 * num_ranges))

    def holds(self, number: int) -> bool:
        """Return whether a lease that was taken is still this learner's."""
        return number in self._spans

    def ended(self, lease: Lease) -> None:
        """Note that the source ends with this range or before it, so that later ranges are empty."""
        beyond = [it for it in self._unread if (it.epoch, it.source) == (lease.epoch, lease.source)]
        beyond = [it for it in beyond if it.index > lease.index]
        self._unread = deque(it for it in self._unread if it not in beyond)
        self._spans |= {it.number: Span(it.number, 0, 0, 0, is_whole=True, is_last=True) for it in beyond}
        if (span := self._spans.get(lease.number)) is not None:
            self._spans[span.number] = replace(span, is_last=True)
        self._asked_s = float("-inf")
        self.was_denied = False

    def trained(self, pieces: Iterable[Piece], at: int) -> None:
        """Note which leases a step was trained on.

        Args:
            pieces: parts of its batches, in order.
            at: token counter before the step.
        """
        for piece in pieces:
            start, at = at, at + piece.tokens
            span = None if piece.number is None else self._spans.get(piece.number)
            if span is None:
                self._repeat(start, at)
                self.num_repeated += piece.tokens
                continue
            self._spans[span.number] = Span(
                number=span.number,
                samples=span.samples + piece.samples,
                start=span.start if span.samples else start,
                stop=at,
                is_whole=piece.is_whole,
                is_last=span.is_last or piece.is_last,
            )
            if piece.is_whole:
                self._range_tokens = max(self._range_tokens, at - self._spans[span.number].start)

    def between(self, start: int, stop: int) -> tuple[tuple[Span, ...], Ranges]:
        """Return the spans of leases, and the repeats, that overlap these tokens of the counter."""
        spans = tuple(span for span in self._spans.values() if span.start < stop and start < span.stop)
        return spans, tuple((a, b) for a, b in self._repeats if a < stop and start < b)

    # -------------------------------------------------------------------------------------- requests and answers

    @property
    def begun(self) -> tuple[Span, ...]:
        """Progress in all leases that were taken."""
        return tuple(self._spans.values())

    def ask(self, now_s: float, generation: int, tokens_per_s: float, *, wants: bool) -> list[AskRanges]:
        """Return the request for leases that is due, if any.

        Args:
            now_s: current time.
            generation: generation of the run.
            tokens_per_s: pace of the learner.
            wants: whether to ask for further leases.
        """
        if self.catalogue is None:
            return []
        self._ahead = ahead = self._needed(tokens_per_s)
        wanted = ahead - len(self._unread) if wants else 0
        is_urgent = wants and self.is_low
        if not is_urgent and now_s - self._asked_s < self._pause_s(wanted, ahead):
            return []
        room = max(0, MAX_LEASES - len(self._spans) - len(self._unread))
        self.was_denied |= wanted > 0 and room == 0
        wanted = max(0, min(wanted, room))
        self._asked_s, self._asked_for, self._waits_for_answer = now_s, wanted, True
        unread = tuple(lease.number for lease in self._unread)
        return [AskRanges(generation, self.catalogue, wanted, self._drops, self.begun, unread)]

    @property
    def is_low(self) -> bool:
        """Whether leases should be requested at once."""
        missing = self._ahead - len(self._unread)
        return 4 * missing >= self._ahead and not self._waits_for_answer and not self.was_denied

    def _pause_s(self, wanted: int, ahead: int) -> float:
        if 4 * wanted >= ahead:
            return ASK_AGAIN_S
        return REPORT_S if wanted > 0 or any(span.is_whole for span in self._spans.values()) else math.inf

    def _needed(self, tokens_per_s: float) -> int:
        if not self._range_tokens:
            return self._least
        return min(MAX_AHEAD, max(self._least, math.ceil(AHEAD_S * tokens_per_s / self._range_tokens)))

    def hear(self, message: Leases) -> None:
        """Process the syncer's answer."""
        self._waits_for_answer = False
        gone = set(message.gone)
        self._unread = deque(lease for lease in self._unread if lease.number not in gone)
        for number in gone & self._spans.keys():
            span = self._spans.pop(number)
            self._repeat(span.start, span.stop)
        fresh = sorted((lease for lease in message.leases if lease.number > self._highest), key=lambda it: it.number)
        self._unread = deque(sorted([*self._unread, *fresh], key=lambda lease: lease.epoch))
        if fresh:
            self._highest = fresh[-1].number
        self.was_denied = self._asked_for > 0 and not message.leases

    def welcomed(self, *, is_anew: bool) -> None:
        """Ask again after a reconnect; in a new generation (`is_anew`) all leases were given back."""
        if is_anew:
            self.hear(Leases((), (*self._spans, *(lease.number for lease in self._unread))))
        self._asked_s = float("-inf")
        self.was_denied = False

    def _repeat(self, start: int, stop: int) -> None:
        if start == stop:
            return
        if self._repeats and self._repeats[-1][1] == start:
            start = self._repeats.pop()[0]
        self._repeats.append((start, stop))
