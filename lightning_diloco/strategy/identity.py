"""Which learner this process is.

1. `learner=` wins over DILOCO_LEARNER. Who joins a run without either is `<host>-<slot>`
   (`runtime/naming.py`), so that one started again is the same learner.
2. Who starts a run of its own shares no path with anybody, and needs no name yet: the link gives it one.
"""

from __future__ import annotations

import os

from lightning_diloco.config import LearnerConfig
from lightning_diloco.runtime.naming import own_name
from lightning_diloco.transport.address import JoinAddress


def given_join(config: LearnerConfig) -> str | None:
    """The join string of a run that others have started; None: this learner starts one."""
    return config.join or os.environ.get("DILOCO_JOIN") or None


def learner_id(config: LearnerConfig) -> str | None:
    """The id known before the run is joined, or None.

    Raises:
        ConfigError: the join string is not one.
    """
    name = config.learner or os.environ.get("DILOCO_LEARNER")
    join = given_join(config)
    return name or (own_name(JoinAddress.parse(join).run) if join else None)
