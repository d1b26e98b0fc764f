"""Compares the contributions of a round with each other; `protocol/syncer/conduct.py` decides what follows.

A contribution is odd, and refused, if

1. it is much longer than usual by the word of two other learners (`norm_guard.py`).
2. it is, to the last bit of its norms, the one that its learner sent last, and there are two others to tell.

It is odd, and merged for it does no harm, if nearly nothing is in it where others have something (NOTHING).

How alike contributions are is the median of the cosines with each of the others, which one broken learner does not
move; it takes two others in the round. Contributions on trial are compared with the others', not they with it.

Source: our choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

from lightning_diloco.core.encoded import Measured
from lightning_diloco.protocol.actions import Contribution
from lightning_diloco.protocol.events import Verdict
from lightning_diloco.syncer.norm_guard import Limit, NormGuard

NOTHING = 1e-3  # of the usual norm: the first contributions of a long warm-up are longer


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is found of a round.

    Args:
        max_norms: of each contribution that may be merged.
        verdicts: by session, on trial or not.
    """

    max_norms: tuple[float, ...]
    verdicts: dict[str, Verdict]

    @property
    def refused(self) -> dict[str, Verdict]:
        """Verdicts on contributions that must not be merged."""
        return {session: verdict for session, verdict in self.verdicts.items() if verdict.is_refused}


class Judge:
    """Compares the contributions of rounds.

    Args:
        usual: norms of the run.
    """

    def __init__(self, usual: NormGuard) -> None:
        self._usual = usual
        self._last: dict[tuple[str, int], tuple[tuple[str, int], tuple[float, ...]]] = {}  # by learner and fragment

    def judge(
        self, p: int, contributions: Sequence[Contribution], on_trial: Sequence[Contribution], measured: Measured
    ) -> Judgement:
        """Look at a round.

        Args:
            p: the fragment.
            contributions: to be merged.
            on_trial: to be compared only.
            measured: all of these, in this order.
        """
        everybody, norms = [*contributions, *on_trial], measured.norms
        present = {c.learner: (norm, c.steps) for c, norm in zip(contributions, norms, strict=False)}
        limits = [self._usual.limit(p, c.learner, c.steps, present) for c in everybody]
        verdicts = {}
        for m, (contribution, limit) in enumerate(zip(everybody, limits, strict=True)):
            others = [j for j in range(len(contributions)) if j != m]
            cosines = [float(measured.cosines_MM[m, j]) for j in others if norms[j] > 0]
            likeness = median_high(cosines) if len(cosines) >= 2 and norms[m] > 0 else None
            is_repeated = self._is_repeated(p, contribution, tuple(measured.norms_EM[:, m].tolist()))
            odd, is_refused = _oddity(norms[m], limit, is_repeated=is_repeated and limit.num_others >= 2)
            is_telling = limit.num_others >= 2 and norms[m] <= limit.norm
            verdicts[contribution.session] = Verdict(odd, is_refused, likeness, is_telling and odd is None)
        return Judgement(tuple(limit.norm for limit in limits[: len(contributions)]), verdicts)

    def _is_repeated(self, p: int, c: Contribution, slices: tuple[float, ...]) -> bool:
        """Whether the last one of this process was the same, and not zero; a round may be judged again."""
        this = (c.session, c.ready.seq)
        (session, seq), last = self._last.get((c.learner, p), (this, ()))
        self._last[c.learner, p] = (this, slices)
        return session == c.session and seq != c.ready.seq and last == slices and any(slices)


def _oddity(norm: float, limit: Limit, *, is_repeated: bool) -> tuple[str | None, bool]:
    """What is wrong with a contribution, if anything, and whether it is refused for that."""
    usual = f"others' are usually {limit.usual:.3g} long for as much work"
    if norm > limit.refused:
        return f"its norm is {norm:.3g}; {usual}; at most {limit.refused:.3g} is accepted", True
    if is_repeated:
        return "it equals the one before it to the last bit", True
    if limit.num_others >= 2 and norm < NOTHING * limit.usual:
        return f"its norm is {norm:.3g}; {usual}", False
    return None, False
