"""Compare the contributions of a round with each other; `protocol/syncer/conduct.py` decides on quarantine.

A contribution is odd and refused, if there are at least two other learners to compare with, and

1. it is much longer than usual (`norm_guard.py`), or
2. all its norms equal those of the learner's previous contribution to the last bit.

A contribution is odd but merged, because it is harmless, if it is shorter than NOTHING times the usual norm.

The likeness of a contribution is the median of its cosines with the other contributions of the round. It needs two
others, so that one broken learner cannot move it. Contributions of learners in quarantine ("on trial") are compared
with the others, but the others are not compared with them.

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

NOTHING = 1e-3  # part of the usual norm; even the first contributions of a long warm-up are longer


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of comparing a round's contributions.

    Args:
        max_norms: norm limit of each contribution that may be merged.
        verdicts: verdict on each contribution, by session.
    """

    max_norms: tuple[float, ...]
    verdicts: dict[str, Verdict]

    @property
    def refused(self) -> dict[str, Verdict]:
        """Verdicts that refuse the contribution."""
        return {session: verdict for session, verdict in self.verdicts.items() if verdict.is_refused}


class Judge:
    """Compares the contributions of rounds.

    Args:
        usual: usual norms of the run.
    """

    def __init__(self, usual: NormGuard) -> None:
        self._usual = usual
        self._last: dict[tuple[str, int], tuple[tuple[str, int], tuple[float, ...]]] = {}  # by learner and fragment

    def judge(
        self, p: int, contributions: Sequence[Contribution], on_trial: Sequence[Contribution], measured: Measured
    ) -> Judgement:
        """Compare the contributions of a round.

        Args:
            p: fragment.
            contributions: contributions to be merged.
            on_trial: contributions of learners in quarantine, which are only compared.
            measured: norms and cosines of all of these, in this order.
        """
        everybody, norms = [*contributions, *on_trial], measured.norms
        cosines_MM, slice_norms_EM = measured.cosines, measured.slice_norms
        present = {c.learner: (norm, c.steps) for c, norm in zip(contributions, norms, strict=False)}
        limits = [self._usual.limit(p, c.learner, c.steps, present) for c in everybody]
        verdicts = {}
        for m, (contribution, limit) in enumerate(zip(everybody, limits, strict=True)):
            others = [j for j in range(len(contributions)) if j != m]
            cosines = [float(cosines_MM[m, j]) for j in others if norms[j] > 0]
            likeness = median_high(cosines) if len(cosines) >= 2 and norms[m] > 0 else None
            is_repeated = self._is_repeated(p, contribution, tuple(slice_norms_EM[:, m].tolist()))
            odd, is_refused = _oddity(norms[m], limit, is_repeated=is_repeated and limit.num_others >= 2)
            is_telling = limit.num_others >= 2 and norms[m] <= limit.norm
            verdicts[contribution.session] = Verdict(odd, is_refused, likeness, is_telling and odd is None)
        return Judgement(tuple(limit.norm for limit in limits[: len(contributions)]), verdicts)

    def _is_repeated(self, p: int, c: Contribution, slices: tuple[float, ...]) -> bool:
        """Return whether the norms equal those of the previous seq and are not zero; a round may be judged twice."""
        this = (c.session, c.ready.seq)
        (session, seq), last = self._last.get((c.learner, p), (this, ()))
        self._last[c.learner, p] = (this, slices)
        return session == c.session and seq != c.ready.seq and last == slices and any(slices)


def _oddity(norm: float, limit: Limit, *, is_repeated: bool) -> tuple[str | None, bool]:
    """Return the reason why a contribution is odd, or None, and whether it is refused for this reason."""
    usual = f"the others' norm is usually {limit.usual:.3g} for as much work"
    if norm > limit.refused:
        what = f"its norm is {norm:.3g}; {usual}; at most {limit.refused:.3g} is accepted"
        return f"{what}; its learning rate may be too high, because its schedule began anew", True
    if is_repeated:
        return "it equals the previous one to the last bit", True
    if limit.num_others >= 2 and norm < NOTHING * limit.usual:
        return f"its norm is {norm:.3g}; {usual}", False
    return None, False
