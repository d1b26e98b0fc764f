"""All errors that this package raises.

    DiLoCoError
    ├── LocalError            the request cannot be carried out
    │   ├── ConfigError       options are unknown or contradictory; all problems are listed at once
    │   ├── PlanMismatchError the model is not the model of the run
    │   └── NonFiniteError    NaN or Inf where finite numbers are required
    ├── RemoteError           the other side refused, or cannot be reached
    │   ├── JoinError         a run could not be joined
    │   │   └── RunOverError  the run has ended
    │   ├── AuthError         wrong token, or a certificate that is not the pinned one
    │   ├── FencedError       a newer process runs under this learner id
    │   ├── RefusedError      contributions were refused three times in a row
    │   ├── ShardError        a process that holds a part of the fragments has failed or cannot be reached
    │   └── TransportError    a call failed or exceeded its deadline; it may be retried
    │       ├── BusyError             too many events of a session wait for the syncer
    │       ├── RestoringError        the syncer is reading its disk and will be ready by itself
    │       ├── StandbyError          the syncer is a standby, and does not serve the run
    │       └── CorruptMessageError   wrong length, checksum or fields; the message was dropped
    └── StorageError          a write to disk failed, or data on disk is missing or damaged
        ├── InUseError        another process uses the log
        └── CorruptLogError   a durable record cannot be read back

A message has three parts: what was found (with values), what is allowed, and what to do. For an unknown name,
`did_you_mean` suggests what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return a question with the known name that is most similar to this one; None if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else None


class DiLoCoError(Exception):
    """Root of all errors of this package."""


class LocalError(DiLoCoError):
    """The caller's request cannot be carried out."""


class ConfigError(LocalError, ValueError):
    """Options are unknown or contradict each other.

    Args:
        problems: one sentence per problem; the message shows all of them.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        lines = self.problems[0] if len(self.problems) == 1 else "".join(f"\n  - {p}" for p in self.problems)
        super().__init__(lines)


class PlanMismatchError(LocalError):
    """Parameter names, shapes or frozen values differ from those of the run."""


class NonFiniteError(LocalError, ValueError):
    """Values to send contain NaN or Inf."""


class RemoteError(DiLoCoError):
    """The other side refused, or cannot be reached."""


class JoinError(RemoteError):
    """A run could not be joined."""


class RunOverError(JoinError):
    """The run has ended by itself, so there is nothing left to do."""


class AuthError(RemoteError):
    """The token is wrong, or the certificate is not the pinned one."""


class FencedError(RemoteError):
    """A newer process took over this learner id; this one must stop."""


class RefusedError(RemoteError):
    """The syncer refused this learner's contributions three times in a row."""


class TransportError(RemoteError):
    """A call failed or exceeded its deadline; it may be retried."""


class BusyError(TransportError):
    """Too many events of a session wait for the syncer; the call may be retried after a pause."""


class RestoringError(TransportError):
    """The syncer has restarted and is reading its disk; the message states its progress."""


class StandbyError(TransportError):
    """The syncer is the standby of the run, and another syncer serves it."""


class ShardError(RemoteError):
    """The process of a shard has failed or cannot be reached; the syncer starts it again, or waits for it."""


class CorruptMessageError(TransportError):
    """A message had a wrong length, checksum or field, and was dropped."""


class StorageError(DiLoCoError, OSError):
    """A write to disk failed, or data on disk is missing or damaged."""


class InUseError(StorageError):
    """A syncer uses the log, or a command reads it."""


class CorruptLogError(StorageError):
    """A durable record cannot be read back."""
