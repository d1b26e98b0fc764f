"""What the tape says of the time before this syncer process: who joined and left when, how fast each one was, how
many bytes came and went, and how long contributions usually were.

The log has what counts; this only describes. What the tape does not know stays unknown, and a figure that needs it is
null; the bytes since the last note before a kill are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_diloco.protocol.syncer.roster import Member, Roster
from lightning_diloco.syncer.norm_guard import NormGuard
from lightning_diloco.syncer.status.progress import EVENT as PROGRESS
from lightning_diloco.transport.base import Json

CLOSED = "closed"  # event: the syncer was told to stop, or the run had ended; until the next line it is paused


@dataclass(slots=True)
class History:
    """Figures of the run before this process.

    Args:
        began_s: time of the first line of the tape, by the clock of this process; None: there was none.
        pauses: from when to when no syncer was meant to run; that one was killed is no pause.
        was_closed: whether the last of the pauses lasted until this process came.
        bytes_up, bytes_down: payload bytes.
        usual: norms of what was committed; this process goes on with it.
    """

    began_s: float | None = None
    pauses: list[tuple[float, float]] = field(default_factory=list)
    was_closed: bool = False
    bytes_up: int = 0
    bytes_down: int = 0
    usual: NormGuard = field(default_factory=NormGuard, compare=False)


def recall(roster: Roster, lines: Iterable[Json], *, now_s: float, unix_s: float) -> History:
    """Give restored members their times back.

    Args:
        roster: as restored from the log; times are of no earlier process.
        lines: of the tape.
        now_s: by the clock of this process.
        unix_s: the same moment by that of the tape.

    Returns:
        The rest of it.
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
