"""Proofs that this syncer, or the one before its disk was rolled back, has said something: a keyed hash of it.

1. Learners carry proofs and show them when they come back; nobody without the run's secret can make one. The secret is
   on record with the start values, so that a disk that was rolled back still has it, and is never sent.
2. A published version has one: who shows a version that this syncer does not know, with its proof, proves that the disk
   was rolled back. It does so once: the new generation is above everything that was proved.
3. So has the word that a session takes part, for one whose record is lost.

Source: our choice; HMAC is RFC 2104.
"""

from __future__ import annotations

import hmac

from lightning_diloco.protocol.messages import Mark

NUM_CHARS = 32


def proof_of_version(secret: str, p: int, mark: Mark) -> str:
    """That this version of fragment p was published with these values."""
    return _proof(secret, f"version {p} {mark.generation} {mark.version} {mark.digest}")


def proof_of_session(secret: str, session: str) -> str:
    """That this session takes part."""
    return _proof(secret, f"session {session}")


def is_proved(secret: str, p: int, mark: Mark) -> bool:
    """Whether a mark comes with its proof."""
    return _equal(mark.proof, proof_of_version(secret, p, mark))


def is_member(secret: str, session: str, proof: str) -> bool:
    """Whether this session was told that it takes part."""
    return _equal(proof, proof_of_session(secret, session))


def _equal(given: str, wanted: str) -> bool:
    return wanted != "" and hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def _proof(secret: str, text: str) -> str:
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()[:NUM_CHARS] if secret else ""
