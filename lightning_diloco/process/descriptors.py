"""Open files that a process may have: each learner's connections take three, each stranger's one."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

FEW = 1024


def allow_all() -> int:
    """Raise the soft limit of open files to the hard one; says so where few remain.

    Returns:
        The limit now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (OSError, ValueError) as error:  # macOS: the hard limit may be above what the kernel takes
        log.debug("open files stay at %d: %s", soft, error)
    if 0 <= soft < FEW:
        log.warning(
            "%d open files are allowed; a syncer takes three for each learner and some for itself; raise the hard "
            "limit (ulimit -Hn) for more than %d learners",
            soft,
            (soft // 2 - 64) // 3,
        )
    return soft
