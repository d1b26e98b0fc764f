"""Statistics of the run before this syncer process, read from the tape: join and leave times, rates, bytes and norms.

The log is authoritative, the tape is not. Values missing on the tape stay unknown, and figures that need them are null.
Bytes transferred between the last progress note and a kill are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_diloco.protocol.syncer.roster import Member, Roster
from lightning_diloco.syncer.norm_guard import NormGuard
from lightning_diloco.syncer.status.progress import EVENT as PROGRESS
from lightning_diloco.transport.base import Json

CLOSED = "closed"  # event: the syncer was stopped or the run ended; the run is paused until the next line


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


def recall(roster: Roster, lines: Iterable[Json], *, now_s: float, unix_s: float) -> History:
    """Restore the times and rates of members, and the statistics, from the tape.

    Args:
        roster: members as restored from the log, without times; changed in place.
        lines: lines of the tape.
        now_s: current time on the clock of this process.
        unix_s: the same moment on the clock of the tape.

    Returns:
        The other statistics.
    """
    past = History()
    members = {(member.learner, member.incarnation): member for member in roster.members.values()}
    newest: dict[str, Member] = {}
    closed_s: float | None = None
    for line in lines:
        at_s = now_s - (unix_s - line["t"])
        past.began_s = at_s if past.began_s is None else past.began_s
        if closed_s is not None:
            past.pauses.append((closed_s, at_s))
        closed_s = at_s if line["event"] == CLOSED else None
        if line["event"] == "join" and (joined := members.get((line["learner"], line["incarnation"]))):
            if (replaced := newest.get(joined.learner)) is not None and replaced.ended_s is None:
                replaced.ended_s = at_s
            joined.active_s, newest[joined.learner] = at_s, joined
        elif line["event"] == "leave" and (left := newest.get(line["learner"])):
            left.ended_s = at_s
        elif line["event"] == "outer":
            past.usual.learn(line["fragment"], line["learners"], line["norms"], line["steps"], line["kept"])
        elif line["event"] == PROGRESS:
            past.bytes_up, past.bytes_down = line["bytes_up"], line["bytes_down"]
            for learner in line["learners"]:
                if (member := newest.get(learner["id"])) is not None:
                    member.tokens_per_s = learner["tokens_per_s"] or member.tokens_per_s
    if closed_s is not None:
        past.was_closed = True
        past.pauses.append((closed_s, now_s))
    return past
