"""Who takes part: sessions, incarnations, leases.

1. A session is one process, known by its nonce. The same session always has the same incarnation.
2. A new incarnation is granted at once but becomes active, and fences older ones off, only when its process confirms.
3. A learner id that is still being heard from is in use; the newcomer is told so. One that has fallen silent for three
   heartbeats gives way.
4. The electorate of a round is whoever is stepping or draining; nobody waits for anyone else.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

from lightning_diloco.protocol.messages import Fate, Phase, Progress, Reason

FateOf = tuple[int, Fate, int | None, str | None, float]
State = Literal["joining", "confirmed", "active", "left", "fenced"]

SILENT_HEARTBEATS = 3
STALL_STEPS, MAX_STALL_S = 5, 600.0


@dataclass(slots=True)
class Member:
    """One session.

    Args:
        session, learner, incarnation: whose it is.
        slot: decides its part of the data; see `slot_for`.
        state: joining (granted), confirmed (waiting for the start), active, left, or fenced off.
        is_lapsed: its lease ran out; it may come back.
        phase: what it said it is doing.
        connection: highest connection number heard.
        fates: per fragment, the last decided (seq, fate, version, reason, kept), kept being the part of its values that
            was merged, 0..1.
        last_seq: per fragment, the highest seq heard.
        num_superseded: per fragment, contributions superseded in a row since it was last waited for.
        merged_s: per fragment, when its last contribution was merged.
        most_tokens: a step that are believed, 0: not known yet.
        is_disbelieved: it says what cannot be, and was told to stop.
        num_refused, num_clipped: contributions that were refused, and that were merged with a norm scaled down.
    """

    session: str
    learner: str
    incarnation: int
    slot: int
    state: State = "joining"
    is_lapsed: bool = False
    phase: Phase = "stepping"
    connection: int = 0
    where: str = ""
    heard_s: float = 0.0
    step: int = 0
    stepped_s: float = 0.0
    step_s: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    landed: tuple[int, ...] = ()
    active_s: float | None = None
    ended_s: float | None = None
    contributed_s: float | None = None
    ending: Reason | None = None
    fates: dict[int, FateOf] = field(default_factory=dict)
    last_seq: dict[int, int] = field(default_factory=dict)
    num_superseded: dict[int, int] = field(default_factory=dict)
    num_refused: int = 0
    num_clipped: int = 0
    most_tokens: float = 0.0
    is_disbelieved: bool = False
    merged_s: dict[int, float] = field(default_factory=dict)

    @property
    def work_per_s(self) -> float | None:
        """Tokens per second, times tokens per step; None until both are known (`shares.py`)."""
        if not (self.tokens and self.step and self.step_s):
            return None
        return (self.tokens / self.step) ** 2 / self.step_s

    @property
    def is_live(self) -> bool:
        """Active, and its lease has not run out."""
        return self.state == "active" and not self.is_lapsed

    def is_stalled(self, now_s: float, heartbeat_s: float) -> bool:
        """Whether it should be stepping but is not."""
        patience_s = max(min(STALL_STEPS * self.step_s, MAX_STALL_S), SILENT_HEARTBEATS * heartbeat_s)
        return self.phase == "stepping" and now_s - self.stepped_s > patience_s

    def takes_part(self, now_s: float, heartbeat_s: float) -> bool:
        """Whether a round that opens now may wait for it."""
        if not self.is_live or self.phase == "evaluating":
            return False
        return self.phase == "draining" or (self.step > 0 and not self.is_stalled(now_s, heartbeat_s))

    def is_at_work(self, now_s: float, heartbeat_s: float) -> bool:
        """Whether work of it is on its way to the anchor: it steps, evaluates between steps, or drains."""
        return self.is_live and self.step > 0 and not self.is_stalled(now_s, heartbeat_s)

    def hear(self, progress: Progress, phase: Phase, now_s: float) -> None:
        """Where it says it stands."""
        if progress.step > self.step or (phase == "stepping" and self.phase != "stepping"):
            self.stepped_s = now_s
        self.step, self.tokens, self.landed, self.phase = progress.step, progress.tokens, progress.landed, phase

    def heard_stepping(self, step_s: float, now_s: float) -> None:
        """It asks for a round, so it is stepping or draining."""
        self.step_s, self.stepped_s, self.step = step_s, now_s, max(1, self.step)
        if self.phase == "evaluating":
            self.phase = "stepping"


class Roster:
    """All sessions of a run, past ones included.

    Attributes:
        quarantined: learner ids whose contributions are not merged, and why (`conduct.py`).
    """

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.quarantined: dict[str, str] = {}

    def __getitem__(self, session: str) -> Member:
        return self.members[session]

    def get(self, session: str) -> Member | None:
        return self.members.get(session)

    def heard(self, session: str, at_s: float) -> None:
        """Bulk of this session came in or went out: it is alive."""
        if member := self.members.get(session):
            member.heard_s = max(member.heard_s, at_s)

    def in_state(self, *states: State) -> list[Member]:
        return [m for m in self.members.values() if m.state in states]

    def active(self, learner: str) -> Member | None:
        """The active session of this learner id."""
        return next((m for m in self.in_state("active") if m.learner == learner), None)

    def older(self, member: Member) -> list[Member]:
        """Sessions of the same learner that a new one fences off."""
        return [
            m
            for m in self.in_state("joining", "confirmed", "active")
            if m.learner == member.learner and m.incarnation < member.incarnation
        ]

    def owner(self, learner: str, newcomer: str) -> Member | None:
        """The newest session that takes part under this learner id, or is about to."""
        held = [m for m in self.in_state("joining", "confirmed", "active") if m.learner == learner]
        return max((m for m in held if m.session != newcomer), key=lambda m: m.incarnation, default=None)

    def live(self) -> list[Member]:
        return [m for m in self.members.values() if m.is_live]

    def is_quarantined(self, session: str) -> bool:
        """Whether nobody waits for it, and what it sends is not merged."""
        return self.members[session].learner in self.quarantined

    def trusted(self) -> list[Member]:
        return [m for m in self.live() if m.learner not in self.quarantined]

    def next_incarnation(self, learner: str) -> int:
        return 1 + max((m.incarnation for m in self.members.values() if m.learner == learner), default=0)

    def slot_for(self, learner: str, parts: int) -> int:
        """The learner's slot; the lowest ones are the parts of the data, and are given away first.

        A slot is kept over restarts. Else it is the part with the number that the name ends in, if nobody has that; the
        lowest part that nobody has; the lowest one whose learner is gone; or a slot beyond the parts.

        Args:
            learner: learner id.
            parts: of the data; 1 where it is not split.
        """
        ever_held = {m.slot for m in self.members.values()}
        held = {m.slot for m in self.members.values() if m.learner != learner and self._is_here(m)}
        own = next((m.slot for m in reversed(self.members.values()) if m.learner == learner), None)
        if own is not None and own not in held:
            return own
        digits = learner[len(learner.rstrip("0123456789")) :]
        wanted = [int(digits)] if digits and len(digits) <= 6 else []
        of_parts: list[int] = [slot for slot in (*wanted, *range(parts)) if slot < parts]
        never_held = next((slot for slot in of_parts if slot not in ever_held), None)
        if never_held is not None:
            return never_held
        return next(slot for slot in itertools.count() if slot not in held)

    @staticmethod
    def _is_here(member: Member) -> bool:
        """Whether it takes part, or is about to."""
        return member.state in ("joining", "confirmed") or member.is_live

    def at_work(self, now_s: float, heartbeat_s: float) -> list[Member]:
        return [m for m in self.trusted() if m.is_at_work(now_s, heartbeat_s)]

    def electorate(self, now_s: float, heartbeat_s: float) -> set[str]:
        return {m.session for m in self.trusted() if m.takes_part(now_s, heartbeat_s)}
