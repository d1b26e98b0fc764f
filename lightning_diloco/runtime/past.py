"""What the tape says of the time before this syncer process: who joined and left when, and how fast each one was.

The log has what counts; these times only describe. What the tape does not know stays unknown, and a figure that needs
it is null.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_diloco.protocol.roster import Member, Roster
from lightning_diloco.runtime.progress import EVENT as PROGRESS
from lightning_diloco.transport.base import Json


def recall(roster: Roster, lines: Iterable[Json], *, now_s: float, unix_s: float) -> None:
    """Give restored members their times back.

    Args:
        roster: as restored from the log; times are of no earlier process.
        lines: of the tape.
        now_s: by the clock of this process.
        unix_s: the same moment by that of the tape.
    """
    members = {(member.learner, member.incarnation): member for member in roster.members.values()}
    newest: dict[str, Member] = {}
    for line in lines:
        at_s = now_s - (unix_s - line["t"])
        if line["event"] == "join" and (joined := members.get((line["learner"], line["incarnation"]))):
            if (replaced := newest.get(joined.learner)) is not None and replaced.ended_s is None:
                replaced.ended_s = at_s
            joined.active_s, newest[joined.learner] = at_s, joined
        elif line["event"] == "leave" and (left := newest.get(line["learner"])):
            left.ended_s = at_s
        elif line["event"] == PROGRESS:
            for learner in line["learners"]:
                if (member := newest.get(learner["id"])) is not None:
                    member.tokens_per_s = learner["tokens_per_s"] or member.tokens_per_s
