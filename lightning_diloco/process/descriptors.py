"""The limit of open files. The syncer needs three for each learner, and one for each other connection."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

FEW = 1024


def allow_all() -> int:
    """Raise the soft limit of open files to the hard limit, and warn if it is low.

    Returns:
        The new soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (OSError, ValueError) as error:  # macOS: the hard limit may be above what the kernel accepts
        log.debug("open files stay at %d: %s", soft, error)
    if 0 <= soft < FEW:
        log.warning(
            "%d open files are allowed; a syncer needs three for each learner and some for itself; raise the hard "
            "limit (ulimit -Hn) for more than %d learners",
            soft,
            (soft // 2 - 64) // 3,
        )
    return soft
