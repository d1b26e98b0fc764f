"""Every error this package raises.

    DiLoCoError
    ├── LocalError            you asked for something that cannot be done
    │   ├── ConfigError       options unknown or contradictory; all problems are listed at once
    │   ├── PlanMismatchError this model is not the model of the run
    │   └── NonFiniteError    NaN or Inf where finite numbers are needed
    ├── RemoteError           the other side refused, or cannot be reached
    │   ├── JoinError         a run could not be joined
    │   │   └── RunOverError  because it has ended
    │   ├── AuthError         wrong token, or a certificate that is not the pinned one
    │   ├── FencedError       a newer process runs under this learner id
    │   ├── RefusedError      contributions were refused three times in a row
    │   └── TransportError    a call failed or ran into its deadline; may be tried again
    │       ├── RestoringError        the syncer is there and reads its disk; it will be ready by itself
    │       └── CorruptMessageError   wrong length, checksum or fields; nothing of it was used
    └── StorageError          the disk did not take, or does not hold, what it should
        └── CorruptLogError   a record that had been durable cannot be read back

A message has three parts: what was found (with values), what is allowed, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class DiLoCoError(Exception):
    """Root of all errors of this package."""


class LocalError(DiLoCoError):
    """The caller asked for something that cannot be done."""


class ConfigError(LocalError, ValueError):
    """Options are unknown or contradict each other.

    Args:
        problems: one sentence each; all of them are shown together.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        lines = self.problems[0] if len(self.problems) == 1 else "".join(f"\n  - {p}" for p in self.problems)
        super().__init__(lines)


class PlanMismatchError(LocalError):
    """Parameter names, shapes or frozen values differ from those of the run."""


class NonFiniteError(LocalError, ValueError):
    """NaN or Inf in values that are to be sent."""


class RemoteError(DiLoCoError):
    """The other side refused, or cannot be reached."""


class JoinError(RemoteError):
    """A run could not be joined."""


class RunOverError(JoinError):
    """The run has ended by itself; there is nothing left to do in it."""


class AuthError(RemoteError):
    """Wrong token, or a certificate that is not the pinned one."""


class FencedError(RemoteError):
    """A newer process took over this learner id; this one must stop."""


class RefusedError(RemoteError):
    """The syncer refused this learner's contributions three times in a row."""


class TransportError(RemoteError):
    """A call failed or ran into its deadline; it may be tried again."""


class RestoringError(TransportError):
    """The syncer was started again and reads its disk; the message says how far it is."""


class CorruptMessageError(TransportError):
    """A message had a wrong length, checksum or field; nothing of it was used."""


class StorageError(DiLoCoError, OSError):
    """The disk did not take what was written."""


class CorruptLogError(StorageError):
    """A record that had been durable cannot be read back."""
