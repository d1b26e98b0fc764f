"""The end of a learner: how long it waits for its last contributions, and when it asks for their rounds.

1. A drain with a fixed time ends after that time.
2. Any other drain continues while contributions advance: each upload, merge or landing extends it by DRAIN_S, or by
   DRAIN_ROUNDS median rounds if that is longer. In total, it takes at most DRAIN_STAGES times as long per fragment.
3. If the syncer cannot be reached, a drain without a fixed time waits for it, up to OUTAGE_S after the end of training.
4. During the first WAIT_SHARE of the usual time, intents are patient: the syncer lets learners that evaluate finish, so
   that their work is merged in the same rounds.
5. The syncer keeps an intent, but a message may be lost. So an intent is repeated, after pauses that double from ASK_S
   to MAX_ASK_S.

Source: our choice.
"""

from __future__ import annotations

from collections.abc import Sequence

DRAIN_S, DRAIN_ROUNDS, DRAIN_STAGES = 60.0, 3.0, 3
OUTAGE_S = 600.0  # a syncer that moves to another machine is started again within minutes
ASK_S, MAX_ASK_S = 0.2, 4.0
WAIT_SHARE = 0.5


class Drain:
    """The clock of a drain.

    Args:
        now_s: end of training.
        is_wanted: False if the learner leaves at once.
        fixed_s: time that the drain may take; None: see rule 2.
        round_s: median duration of a round.
        num_fragments: P.

    Attributes:
        until_s: the drain ends at this time, unless it is extended.
    """

    def __init__(
        self, now_s: float, *, is_wanted: bool, fixed_s: float | None, round_s: float, num_fragments: int
    ) -> None:
        usual_s = max(DRAIN_S, DRAIN_ROUNDS * round_s) if fixed_s is None else fixed_s
        self._extension_s = usual_s if fixed_s is None else 0.0
        self.until_s = now_s + (usual_s if is_wanted else 0.0)
        self._outage_until_s = now_s + (OUTAGE_S if fixed_s is None else 0.0)
        self._latest_s = self._outage_until_s + DRAIN_STAGES * num_fragments * usual_s
        self._patient_until_s = now_s + WAIT_SHARE * usual_s
        self._asks: dict[int, tuple[float, float]] = {}  # by fragment: time of the next intent, and the pause before it

    def extend(self, now_s: float) -> None:
        """Continue, because a contribution has advanced."""
        self.until_s = max(self.until_s, min(now_s + self._extension_s, self._latest_s))

    def wait_for_the_syncer(self, now_s: float) -> None:
        """Continue, because the syncer cannot be reached."""
        if now_s < self._outage_until_s:
            self.extend(now_s)

    def patience_s(self, now_s: float) -> float:
        """Return the time for which an intent can wait for learners that evaluate."""
        return max(0.0, self._patient_until_s - now_s)

    def forget_intents(self) -> None:
        """Note that the syncer may have lost all intents."""
        self._asks = {}

    def due(self, waiting: Sequence[int], now_s: float) -> list[int]:
        """Return those of the waiting fragments whose next intent is due, and count it as sent."""
        self._asks = {p: self._asks[p] for p in waiting if p in self._asks}
        found = [p for p in waiting if now_s >= self._asks.get(p, (now_s, ASK_S))[0]]
        for p in found:
            pause_s = self._asks.get(p, (now_s, ASK_S))[1]
            again_s = now_s + pause_s
            if now_s < self._patient_until_s < again_s:
                again_s = self._patient_until_s  # from then on intents have no patience
            self._asks[p] = again_s, min(2 * pause_s, MAX_ASK_S)
        return found
