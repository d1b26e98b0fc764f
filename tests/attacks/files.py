"""What somebody else on the machine plants in a folder, and what a learner says to whoever reads of it."""

from __future__ import annotations

from pathlib import Path

from lightning_diloco.protocol import messages
from tests.fuzz.target import NUM_FRAGMENTS, Peer

ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\u202efin\x9b31m"


def plant_link(path: Path, victim: Path) -> None:
    """Where a file is about to be written there is a link to another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(victim)


def speak_in_control_characters(peer: Peer) -> None:
    """Everything that a learner can say of itself in words."""
    progress = messages.Progress(4, 64, (0,) * NUM_FRAGMENTS, (((0, 64),),) * NUM_FRAGMENTS)
    peer.say(messages.Heartbeat("stepping", progress, 0.01, 1e3, {ESCAPES: 1.0}))
    peer.say(messages.Evaluated(None, ESCAPES))
