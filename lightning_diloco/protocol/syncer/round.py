"""One round of one fragment: its stages and its state.

    stage         what it waits for                            next
    ------------  -------------------------------------------  ---------------------------------------------------------
    collecting    ready or decline from the whole electorate;  transferring; over (none has progress)
                  or the quorum, then the grace window
    transferring  members' payloads, up to a deadline          merging; over (no payload came)
    merging       the outer gradient                           committing; merging (a member was fenced off);
                                                               transferring (payloads were lost); over (all left)
    committing    the disk                                     over (the fragment has a new version); suspended
    suspended     the next attempt to write to disk            transferring

Only a round that reaches `committing` changes durable state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_diloco.protocol.actions import Contribution
from lightning_diloco.protocol.messages import Intent

NUM_DIGESTS_KEPT = 64

Stage = Literal["collecting", "transferring", "merging", "committing", "suspended", "over"]

NEXT: dict[Stage, tuple[Stage, ...]] = {
    "collecting": ("transferring", "over"),
    "transferring": ("merging", "over"),
    "merging": ("committing", "merging", "over", "transferring"),
    "committing": ("over", "suspended"),
    "suspended": ("transferring",),
    "over": (),
}


@dataclass(slots=True)
class Held:
    """A contribution without a fate; a late one missed the deadline of a round that waited for it."""

    contribution: Contribution
    ready_s: float
    has_payload: bool = False
    is_late: bool = False


@dataclass(slots=True)
class Round:
    """One open round.

    Args:
        number: number of the round, unique and increasing.
        opener_step_s: the opener's time per step.
        electorate: sessions that the round waits for.
        num_stepping: size of the electorate when the round opened.
        owed: sessions that were superseded twice in a row, so this round waits for them.
        until_s: when the current stage ends by itself.
        answers_until_s: when sessions that have not answered leave the electorate.
        members: sessions whose contributions are merged, in the order of the merge; empty until membership closes.
        shares: the members' shares of the fleet's work.
        num_ready, quorum: contributions that were ready, and that were needed, when membership closed.
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
        """Go to the next stage, which must be one that the table allows."""
        assert stage in NEXT[self.stage], f"round {self.number} from {self.stage} to {stage}"
        self.stage = stage


@dataclass(slots=True)
class FragmentRounds:
    """State of one fragment at the syncer.

    Args:
        version: current version.
        digests: digests of the last versions, by version.
        held: contributions without a fate, by session.
        round: the open round.
        wanted: intents for the next round, by session.
    """

    version: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    round: Round | None = None
    wanted: dict[str, Intent] = field(default_factory=dict)

    def note_digest(self, version: int, digest: str) -> None:
        """Keep the digest of a version; only the last NUM_DIGESTS_KEPT are kept."""
        self.digests[version] = digest
        for old in [known for known in self.digests if known <= version - NUM_DIGESTS_KEPT]:
            del self.digests[old]


@dataclass(slots=True)
class Counts:
    """Totals over all rounds, for the summary."""

    num_commits: int = 0
    num_aborted: int = 0
    num_contributors: int = 0
    num_stepping: int = 0

    @property
    def participation(self) -> float | None:
        return self.num_contributors / self.num_stepping if self.num_stepping else None
