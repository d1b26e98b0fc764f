"""One round of one fragment: its stages, and what is kept while it is open.

    stage         what is awaited                              next
    ------------  -------------------------------------------  ---------------------------------------------------------
    collecting    everyone in the electorate to say ready or   transferring; over (nobody has anything)
                  decline; or the quorum, then the grace
    transferring  members' payloads, up to a deadline          merging; over (no payload came)
    merging       the outer gradient                           committing; merging (a member was fenced off); over (all)
    committing    the disk                                     over (the fragment has a new version); suspended
    suspended     the disk, again                              merging; over (all members are gone)

Only a round that has been `committing` changes anything that lasts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_diloco.protocol.actions import Contribution
from lightning_diloco.protocol.messages import Intent

Stage = Literal["collecting", "transferring", "merging", "committing", "suspended", "over"]

NEXT: dict[Stage, tuple[Stage, ...]] = {
    "collecting": ("transferring", "over"),
    "transferring": ("merging", "over"),
    "merging": ("committing", "merging", "over"),
    "committing": ("over", "suspended"),
    "suspended": ("merging", "over"),
    "over": (),
}


@dataclass(slots=True)
class Held:
    """A contribution whose fate is open; one that is late was waited for, in vain."""

    contribution: Contribution
    ready_s: float
    has_payload: bool = False
    is_late: bool = False


@dataclass(slots=True)
class Round:
    """One open round.

    Args:
        number: unique per fragment, growing.
        opener_step_s: the opener's time per step.
        electorate: sessions that may still answer.
        num_stepping: size of the electorate at opening.
        owed: sessions superseded so often that this round waits for them.
        until_s: when the current stage ends by itself.
        answers_until_s: when the round gives up those of the electorate that have not answered.
        members: sessions whose contributions are merged, once that is decided, in the order of the merge.
        shares: of the members, in the work of the fleet.
        num_ready, quorum: contributions that were there, and were needed, when membership closed.
    """

    number: int
    opened_s: float
    announced_s: float
    opener_step_s: float
    electorate: set[str]
    num_stepping: int
    owed: frozenset[str] = frozenset()
    stage: Stage = "collecting"
    quorum_s: float | None = None
    closed_s: float = 0.0
    until_s: float = 0.0
    answers_until_s: float = 0.0
    members: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    num_ready: int = 0
    quorum: int = 1

    def go(self, stage: Stage) -> None:
        """To the next stage; the table above says which may follow."""
        assert stage in NEXT[self.stage], f"round {self.number} from {self.stage} to {stage}"
        self.stage = stage


@dataclass(slots=True)
class FragmentRounds:
    """What the syncer knows of one fragment.

    Args:
        digests: of the last versions, by version.
        held: contributions whose fate is open, by session.
        round: the open one.
        wanted: what sessions said that asked for the next round meanwhile.
    """

    version: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    round: Round | None = None
    wanted: dict[str, Intent] = field(default_factory=dict)


@dataclass(slots=True)
class Counts:
    """Sums over rounds, for the summary."""

    num_commits: int = 0
    num_aborted: int = 0
    num_contributors: int = 0
    num_stepping: int = 0

    @property
    def participation(self) -> float | None:
        return self.num_contributors / self.num_stepping if self.num_stepping else None
