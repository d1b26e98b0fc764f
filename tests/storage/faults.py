"""Crashes and errors at the named points of log and snapshots."""

from __future__ import annotations

import os

from lightning_diloco.storage.redo_log import RedoLog

POINTS = (
    *("append:before", "append:after_header", "append:after_payload", "sync:before", "sync:after"),
    *("rotate:before", "rotate:after_create", "drop:before"),
    *("snapshot:before", "snapshot:after_file", "snapshot:before_rename"),
    *("snapshot:after_rename", "snapshot:after_remove"),
)


class Crash(BaseException):
    """The simulated end of the process."""


class Faults:
    """Raises an error once, when a named point is reached after `skip` earlier times."""

    def __init__(self, point: str = "", skip: int = 0, error: BaseException | None = None) -> None:
        self.arm(point, skip, error or Crash())

    def arm(self, point: str, skip: int, error: BaseException) -> None:
        """Set the error, and the point at which it is raised."""
        self.point, self.skip, self.error = point, skip, error

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.skip -= 1
            if self.skip == -1:
                raise self.error


def kill(log: RedoLog) -> None:
    """Close the files without a sync, as the end of the process does."""
    log._active.close()
    os.close(log._lock_fd)
    log._lock_fd = -1
