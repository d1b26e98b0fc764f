"""Sessions of a run, their incarnations and their state.

1. A session is one process, identified by its nonce. A session always has the same incarnation.
2. A new incarnation is granted at once. It becomes active, and fences off older ones, when its process confirms.
3. A learner id is in use while its process sends messages, and a second process is refused. After three heartbeats of
   silence the second process takes over the id (`admission.py`).
4. The electorate of a round is the set of learners that step or drain. Rounds wait for no others.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

from lightning_diloco.protocol.messages import Fate, Hello, Phase, Progress, Reason

FateOf = tuple[int, Fate, int | None, str | None, float]
State = Literal["joining", "confirmed", "active", "left", "fenced"]

SILENT_HEARTBEATS = 3
STALL_STEPS, MAX_STALL_S = 5, 600.0


@dataclass(slots=True)
class Member:
    """One session.

    Args:
        session, learner, incarnation: identity of the process.
        slot: number that decides its part of the data; see `Roster.slot_for`.
        state: joining (granted), confirmed (waits for the start), active, left, or fenced.
        is_lapsed: its lease ran out; it may return.
        phase: activity of the learner, as last reported.
        drained_s: when it first reported to this process that it drains; None: it has not.
        connection: highest connection number received.
        fates: per fragment, the last (seq, fate, version, reason, kept); `kept` is the merged part of the values, 0..1.
        last_seq: per fragment, the highest seq received.
        num_superseded: per fragment, contributions superseded in a row since a round last waited for it.
        merged_s: per fragment, when its last contribution was merged.
        most_tokens: highest plausible number of tokens per step; 0: not known yet.
        is_disbelieved: its token counter is implausible, and it was told to stop.
        num_refused, num_clipped: number of contributions that were refused, and that were scaled down.
    """

    session: str
    learner: str
    incarnation: int
    slot: int
    state: State = "joining"
    is_lapsed: bool = False
    phase: Phase = "stepping"
    drained_s: float | None = None
    connection: int = 0
    where: str = ""
    site: str = ""
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
        """Tokens per second times tokens per step (`shares.py`); None until both are known."""
        if not (self.tokens and self.step and self.step_s):
            return None
        return (self.tokens / self.step) ** 2 / self.step_s

    @property
    def is_live(self) -> bool:
        """Whether it is active and has not lapsed."""
        return self.state == "active" and not self.is_lapsed

    def is_stalled(self, now_s: float, heartbeat_s: float) -> bool:
        """Return whether it should be stepping but has made no step for too long."""
        patience_s = max(min(STALL_STEPS * self.step_s, MAX_STALL_S), SILENT_HEARTBEATS * heartbeat_s)
        return self.phase == "stepping" and now_s - self.stepped_s > patience_s

    def takes_part(self, now_s: float, heartbeat_s: float) -> bool:
        """Return whether a round that opens now may wait for it."""
        if not self.is_live or self.phase == "evaluating":
            return False
        return self.phase == "draining" or (self.step > 0 and not self.is_stalled(now_s, heartbeat_s))

    def is_at_work(self, now_s: float, heartbeat_s: float) -> bool:
        """Return whether it produces work for the anchor: it steps, evaluates between steps, or drains."""
        return self.is_live and self.step > 0 and not self.is_stalled(now_s, heartbeat_s)

    def greet(self, hello: Hello) -> None:
        """Process a hello: store its connection and the location of the process."""
        self.connection, self.where, self.site = hello.connection, hello.where, hello.site

    def hear(self, progress: Progress, phase: Phase, now_s: float) -> None:
        """Store a progress report."""
        if progress.step > self.step or (phase == "stepping" and self.phase != "stepping"):
            self.stepped_s = now_s
        if phase == "draining" and self.drained_s is None:
            self.drained_s = now_s
        self.step, self.tokens, self.landed, self.phase = progress.step, progress.tokens, progress.landed, phase

    def heard_stepping(self, step_s: float, now_s: float) -> None:
        """Process an intent: a learner that asks for a round is stepping or draining."""
        self.step_s, self.stepped_s, self.step = step_s, now_s, max(1, self.step)
        if self.phase == "evaluating":
            self.phase = "stepping"


class Roster:
    """All sessions of a run, also past ones.

    Attributes:
        quarantined: learner ids in quarantine, with the reason (`conduct.py`).
    """

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.quarantined: dict[str, str] = {}

    def __getitem__(self, session: str) -> Member:
        return self.members[session]

    def get(self, session: str) -> Member | None:
        return self.members.get(session)

    def heard(self, session: str, at_s: float) -> None:
        """Note that the session is alive, because it sent or fetched bulk data."""
        if member := self.members.get(session):
            member.heard_s = max(member.heard_s, at_s)

    def in_state(self, *states: State) -> list[Member]:
        return [m for m in self.members.values() if m.state in states]

    def active(self, learner: str) -> Member | None:
        """Return the active session of a learner id."""
        return next((m for m in self.in_state("active") if m.learner == learner), None)

    def older(self, member: Member) -> list[Member]:
        """Return the older sessions of the same learner, which this one fences off."""
        return [
            m
            for m in self.in_state("joining", "confirmed", "active")
            if m.learner == member.learner and m.incarnation < member.incarnation
        ]

    def owner(self, learner: str, newcomer: str) -> Member | None:
        """Return the newest other session of a learner id that is active or joining."""
        held = [m for m in self.in_state("joining", "confirmed", "active") if m.learner == learner]
        return max((m for m in held if m.session != newcomer), key=lambda m: m.incarnation, default=None)

    def live(self) -> list[Member]:
        return [m for m in self.members.values() if m.is_live]

    def fleet(self) -> frozenset[str]:
        """Return the sessions that take part; a syncer and its standby must count the same (`succession.py`)."""
        return frozenset(m.session for m in self.live())

    def is_quarantined(self, session: str) -> bool:
        """Return whether its learner is in quarantine: no round waits for it, and it is not merged."""
        return bool(self.quarantined) and self.members[session].learner in self.quarantined

    def trusted(self) -> list[Member]:
        return [m for m in self.live() if m.learner not in self.quarantined]

    def next_incarnation(self, learner: str) -> int:
        return 1 + max((m.incarnation for m in self.members.values() if m.learner == learner), default=0)

    def slot_for(self, learner: str, parts: int) -> int:
        """Return a learner's slot; slots below `parts` are the parts of the data.

        The slot is the first free one of these: the learner's earlier slot, the part whose number ends the learner id,
        the lowest part that was never held, and the lowest slot that no present learner holds.

        Args:
            learner: learner id.
            parts: number of parts of the data; 1 if the data is not split.
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
        """Return whether it is joining or live."""
        return member.state in ("joining", "confirmed") or member.is_live

    def at_work(self, now_s: float, heartbeat_s: float) -> list[Member]:
        return [m for m in self.trusted() if m.is_at_work(now_s, heartbeat_s)]

    def electorate(self, now_s: float, heartbeat_s: float) -> set[str]:
        return {m.session for m in self.trusted() if m.takes_part(now_s, heartbeat_s)}
