"""Statistics of the run before this syncer process, read from the tape: join and leave times, rates, bytes and norms.

The log is authoritative, the tape is not. Values missing on the tape stay unknown, and figures that need them are null.
Bytes transferred between the last progress note and a kill are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_diloco.protocol.syncer.roster import Roster
from lightning_diloco.syncer.norm_guard import NormGuard
from lightning_diloco.syncer.status.progress import EVENT as PROGRESS
from lightning_diloco.transport.base import Json

CLOSED = "closed"  # event when the syncer was stopped or the run ended; the run is paused until the next line
_OF_LIVES = {"join": ("event", "learner", "incarnation"), "leave": ("event", "learner", "reason", "tokens")}


@dataclass(slots=True)
class History:
    """Statistics of the run before this process.

    Args:
        began_s: time of the first line of the tape, on the clock of this process; None: the tape is empty.
        pauses: (start, end) of the times when the run was stopped; the time after a kill is not a pause.
        was_closed: whether the run was stopped, not killed, before this process started.
        bytes_up, bytes_down: payload bytes received and sent.
        usual: norms of committed contributions, which this process continues.
    """

    began_s: float | None = None
    pauses: list[tuple[float, float]] = field(default_factory=list)
    was_closed: bool = False
    bytes_up: int = 0
    bytes_down: int = 0
    usual: NormGuard = field(default_factory=NormGuard, compare=False)


@dataclass(slots=True)
class _Life:
    """A member's times, in unix seconds, and its last rate."""

    active_t: float
    ended_t: float | None = None
    tokens_per_s: float = 0.0


class Recollection:
    """A run's history by its tape. Lines are added in order; a standby adds them while the tape grows."""

    def __init__(self) -> None:
        self._began_t: float | None = None
        self._closed_t: float | None = None
        self._pauses: list[tuple[float, float]] = []
        self._lives: dict[tuple[str, int], _Life] = {}
        self._newest: dict[str, _Life] = {}
        self._usual = NormGuard()
        self._bytes = 0, 0
        self._shown: set[frozenset[tuple[str, object]]] = set()

    def add(self, line: Json) -> None:
        """Add the next line."""
        t, event = line["t"], line["event"]
        self._began_t = t if self._began_t is None else self._began_t
        if self._closed_t is not None:
            self._pauses.append((self._closed_t, t))
        self._closed_t = t if event == CLOSED else None
        if event in _OF_LIVES:
            self._shown.add(_key(line))
        if event == "join":
            if (replaced := self._newest.get(line["learner"])) is not None and replaced.ended_t is None:
                replaced.ended_t = t
            life = self._newest[line["learner"]] = _Life(t)
            self._lives[line["learner"], line["incarnation"]] = life
        elif event == "leave" and (left := self._newest.get(line["learner"])):
            left.ended_t = t
        elif event == "outer":
            self._usual.learn(line["fragment"], line["learners"], line["norms"], line["steps"], line["kept"])
        elif event == PROGRESS:
            self._bytes = line["bytes_up"], line["bytes_down"]
            for learner in line["learners"]:
                if (life_ := self._newest.get(learner["id"])) is not None:
                    life_.tokens_per_s = learner["tokens_per_s"] or life_.tokens_per_s

    def has(self, line: Json) -> bool:
        """Return whether this join or leave was added; the other fields of its line do not matter."""
        return _key(line) in self._shown

    def recall(self, roster: Roster, *, now_s: float, unix_s: float) -> History:
        """Restore the times and rates of members.

        Args:
            roster: members as restored from the log, without times; changed in place.
            now_s: current time on the clock of this process.
            unix_s: the same moment on the clock of the tape.

        Returns:
            The other statistics.
        """

        def here(t: float) -> float:
            return now_s - (unix_s - t)

        for member in roster.members.values():
            if (life := self._lives.get((member.learner, member.incarnation))) is not None:
                member.active_s = here(life.active_t)
                member.ended_s = None if life.ended_t is None else here(life.ended_t)
                member.tokens_per_s = life.tokens_per_s or member.tokens_per_s
        pauses = [(here(a), here(b)) for a, b in self._pauses]
        if self._closed_t is not None:
            pauses.append((here(self._closed_t), now_s))
        return History(
            began_s=None if self._began_t is None else here(self._began_t),
            pauses=pauses,
            was_closed=self._closed_t is not None,
            bytes_up=self._bytes[0],
            bytes_down=self._bytes[1],
            usual=self._usual,
        )


def _key(line: Json) -> frozenset[tuple[str, object]]:
    return frozenset((name, line.get(name)) for name in _OF_LIVES[str(line["event"])])
