"""Proofs that the run's syncer has published a version or activated a session. A proof is a keyed hash.

1. Learners keep proofs and present them when they reconnect. A proof can be computed only with the run's secret. The
   secret is recorded with the start values, so a disk that was rolled back still has it. It is never sent.
2. A learner that presents a version unknown to the syncer, with its proof, proves that the syncer's disk was rolled
   back. The new generation is above all proved ones, so each proof has this effect once.
3. A proof of a session shows that the session was active, even if a rolled-back disk has lost its record.

Source: our choice; HMAC is RFC 2104.
"""

from __future__ import annotations

import hmac

from lightning_diloco.protocol.messages import Mark

NUM_CHARS = 32


def proof_of_version(secret: str, p: int, mark: Mark) -> str:
    """Return the proof that this version of fragment p was published with these values."""
    return _proof(secret, f"version {p} {mark.generation} {mark.version} {mark.digest}")


def proof_of_session(secret: str, session: str) -> str:
    """Return the proof that this session was active."""
    return _proof(secret, f"session {session}")


def is_proved(secret: str, p: int, mark: Mark) -> bool:
    """Return whether a mark has a valid proof."""
    return _equal(mark.proof, proof_of_version(secret, p, mark))


def is_member(secret: str, session: str, proof: str) -> bool:
    """Return whether this is a valid proof of the session."""
    return _equal(proof, proof_of_session(secret, session))


def _equal(given: str, wanted: str) -> bool:
    return wanted != "" and hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def _proof(secret: str, text: str) -> str:
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()[:NUM_CHARS] if secret else ""
