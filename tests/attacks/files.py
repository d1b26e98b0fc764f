"""Attacks through files and texts: links planted by another user, and control characters sent by a learner."""

from __future__ import annotations

from pathlib import Path

from lightning_diloco.protocol import messages
from tests.fuzz.target import NUM_FRAGMENTS, Peer

ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\u202efin\x9b31m"


def plant_link(path: Path, victim: Path) -> None:
    """Put a link at a path that will be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(victim)


def odd_words(num_fragments: int) -> list[messages.FromLearner]:
    """Return all texts that a learner can send about itself."""
    progress = messages.Progress(4, 64, (0,) * num_fragments, (((0, 64),),) * num_fragments)
    return [messages.Heartbeat("stepping", progress, 0.01, 1e3, {ESCAPES: 1.0}), messages.Evaluated(None, ESCAPES)]


def speak_in_control_characters(peer: Peer) -> None:
    """Send all of these texts with control characters."""
    peer.say(*odd_words(NUM_FRAGMENTS))
