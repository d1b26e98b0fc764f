"""Measures a learner's speed, and the time that the package's hooks take.

1. Stall is all time inside the package's hooks on the training thread.
2. The undisturbed rate is the median, over the whole run, of tokens per second between two hooks. Goodput compares the
   run with this rate. If a machine becomes faster or slower during the run, all its speeds count.
3. A step that is much longer than usual is left out, because it compiled or wrote a checkpoint. It counts if most
   recent steps are as long.
4. Values are kept sorted, because each step reads these figures. Sorting them each time, as `statistics.quantiles`
   and numpy do, took half of the time of a hook.

Source: our choice.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

NUM_RECENT = 200
NUM_SAMPLES = 512
NUM_WARM_UP = 2
COMPILE_FACTOR = 5.0
NUM_DOUBTED = 9  # last steps, most of which must be long


class _Ordered:
    """Sorted values."""

    def __init__(self) -> None:
        self._ordered: list[float] = []

    @property
    def median(self) -> float:
        """Median of the values; 0 if there are none."""
        values, half = self._ordered, len(self._ordered) // 2
        if not values:
            return 0.0
        return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


class Sample(_Ordered):
    """An even sample of a sequence; when it is full, it drops every other value and doubles its stride."""

    def __init__(self) -> None:
        super().__init__()
        self._values: list[float] = []
        self._stride = 1
        self._seen = 0

    def add(self, value: float) -> None:
        """Add the next value of the sequence."""
        if self._seen % self._stride == 0:
            self._values.append(value)
            insort(self._ordered, value)
        self._seen += 1
        if len(self._values) == NUM_SAMPLES:
            del self._values[1::2]
            self._ordered = sorted(self._values)
            self._stride *= 2


class Recent(_Ordered):
    """The last NUM_RECENT values of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self._values: deque[float] = deque()

    def add(self, value: float) -> None:
        """Add the next value of the sequence."""
        if len(self._values) == NUM_RECENT:
            del self._ordered[bisect_left(self._ordered, self._values.popleft())]
        self._values.append(value)
        insort(self._ordered, value)

    def add_to_last(self, value: float) -> None:
        """Correct the value added last."""
        last = self._values.pop()
        del self._ordered[bisect_left(self._ordered, last)]
        self.add(last + value)

    @property
    def p95(self) -> float:
        """95th percentile of the values; 0 if there are none."""
        return self._ordered[min(len(self._ordered) - 1, int(0.95 * len(self._ordered)))] if self._ordered else 0.0


class StepTimer:
    """Notes when the training thread enters and leaves the step hook, and how long it settles."""

    def __init__(self) -> None:
        self._left_s: float | None = None
        self._seen = 0
        self._step_s = Recent()
        self._lately: deque[tuple[float, int, bool]] = deque(maxlen=NUM_DOUBTED)  # length, tokens, whether doubted
        self._rates = Sample()
        self._exchange_s = Recent()
        self.stall_s = 0.0
        self.num_exchanges = self._last_exchanges = 0

    def entered(self, now_s: float, tokens: int) -> None:
        """Note the end of a step with this number of tokens."""
        if self._left_s is None:
            return
        self._seen += 1
        step_s = now_s - self._left_s
        if self._seen <= NUM_WARM_UP or step_s <= 0:
            return
        is_doubted = 0 < COMPILE_FACTOR * self.step_s < step_s
        self._lately.append((step_s, tokens, is_doubted))
        if not is_doubted:
            self._step_s.add(step_s)
            self._rates.add(tokens / step_s)
        elif 2 * sum(doubted for _, _, doubted in self._lately) > NUM_DOUBTED:
            self._believe()

    def _believe(self) -> None:
        """Accept longer steps; earlier steps then count only in the rate of the whole run."""
        self._step_s = Recent()
        for step_s, tokens, was_doubted in self._lately:
            self._step_s.add(step_s)
            if was_doubted:
                self._rates.add(tokens / step_s)
        self._lately.clear()

    def left(self, entered_s: float, now_s: float, *, num_exchanges: int) -> None:
        """Note the end of a hook that has snapshotted or landed this number of fragments."""
        self._left_s = now_s
        self.stall_s += now_s - entered_s
        self.num_exchanges, self._last_exchanges = self.num_exchanges + num_exchanges, num_exchanges
        if num_exchanges:
            self._exchange_s.add((now_s - entered_s) / num_exchanges)

    def settled(self, for_s: float) -> None:
        """Note the time that copies of the last snapshot took on the training thread, within a step."""
        self.stall_s += for_s
        if self._left_s is not None:
            self._left_s += for_s
        if self._last_exchanges:
            self._exchange_s.add_to_last(for_s / self._last_exchanges)

    def interrupted(self) -> None:
        """Leave out the time until the next step, for example validation or a checkpoint."""
        self._left_s = None

    @property
    def step_s(self) -> float:
        """Median seconds of recent steps; 0 before there are any."""
        return self._step_s.median

    @property
    def long_step_s(self) -> float:
        """95th percentile of recent steps, limited because the first may have compiled; 0 before there are any."""
        return min(self._step_s.p95, COMPILE_FACTOR * self._step_s.median)

    @property
    def tokens_per_s(self) -> float:
        """Median undisturbed rate; 0 before there is any."""
        return self._rates.median

    @property
    def exchange_p95_s(self) -> float:
        """95th percentile of the hook's time per snapshot or landing, including settling."""
        return self._exchange_s.p95
