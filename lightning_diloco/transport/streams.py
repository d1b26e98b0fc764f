"""Find the number of TCP connections ("streams") that carries large payloads fastest over a link.

1. One connection is enough for a near link. On a far link, a connection has only a few MB in flight, and it is slow for
   some time after a lost packet. Two connections are then twice as fast, until they fill the link.
2. `NumStreams` doubles the number as long as transfers become faster by the factor FASTER. Otherwise it returns to the
   last number. It measures the total bytes of TRIALS transfers divided by their total time. If packets are lost, some
   transfers are much slower than others, and the difference grows with the number of streams.
3. After every AGAIN transfers it searches again, because links change.

Source: our choice.
"""

from __future__ import annotations

import threading

MIN_STREAM_BYTES = 2 << 20  # of payload for each stream, at least
MAX_STREAMS = 16
TRIALS = 4
FASTER = 1.2
AGAIN = 64


class NumStreams:
    """Number of streams for one direction of a link; safe to use from several threads."""

    def __init__(self) -> None:
        self._trying = 1
        self._best = (1, 0.0)  # number, and its bytes per second
        self._tried: list[tuple[int, float]] = []  # (bytes, seconds) of each transfer with the tried number
        self._num_settled = -1  # transfers since the search ended; -1 during a search
        self._noting = threading.Lock()

    def number_for(self, num_bytes: int) -> int:
        """Return the number of streams for a payload of this size."""
        return max(1, min(self._trying, num_bytes // MIN_STREAM_BYTES))

    def note(self, num: int, num_bytes: int, seconds: float) -> None:
        """Record the duration of a transfer."""
        with self._noting:
            if num != self._trying or num_bytes < MIN_STREAM_BYTES:
                return  # not a measurement of the tried number
            if self._num_settled >= 0:
                self._num_settled += 1
                if self._num_settled >= AGAIN:
                    self._try(max(1, num // 2), best=(1, 0.0))
                return
            self._tried.append((num_bytes, seconds))
            if len(self._tried) < TRIALS:
                return
            rate = sum(size for size, _ in self._tried) / max(sum(took for _, took in self._tried), 1e-6)
            is_faster = rate > FASTER * self._best[1]
            if is_faster and num < MAX_STREAMS and num_bytes >= 2 * num * MIN_STREAM_BYTES:
                self._try(2 * num, best=(num, rate))
            else:
                self._trying, self._num_settled = num if is_faster else self._best[0], 0

    def _try(self, num: int, best: tuple[int, float]) -> None:
        self._trying, self._best, self._num_settled, self._tried = num, best, -1, []
