"""The id of this process's learner, and the number of its hosts.

1. `learner=` takes precedence over DILOCO_LEARNER. Without either, a learner that joins a run is `<host>-<slot>`
   (`learner/name.py`), so that a restarted process is the same learner.
2. A process can train only once in a run that others have started: a run is one fit of one model. A second fit of the
   script would train another model in the run, or find that the run is over.
3. `diloco run --engine ray` starts a process on each host of a learner and tells it their number. With another number,
   a Trainer would be a learner of its own with the same id, or wait for hosts that do not exist.
4. A learner that starts its own run shares no path with others. The link gives it an id later.
"""

from __future__ import annotations

import os

from lightning_diloco.config import LearnerConfig
from lightning_diloco.errors import ConfigError, JoinError
from lightning_diloco.learner.name import given_address, own_name
from lightning_diloco.process.exit import hard_exit

_done: set[str] = set()  # runs in which a fit of this process has made its last step


def learner_id(config: LearnerConfig) -> str | None:
    """Return the id that is known before the join; None if there is none.

    Raises:
        ConfigError: the join string is malformed.
    """
    name, address = config.learner or os.environ.get("DILOCO_LEARNER"), given_address(config)
    return name or (None if address is None else own_name(address.run))


def check_first_fit(config: LearnerConfig) -> None:
    """Refuse a second fit in the same run.

    Raises:
        JoinError: this process has already trained in the run.
    """
    if (address := given_address(config)) is not None and address.run in _done:
        raise JoinError(
            f"found a second fit in a process that has already trained in run {address.run}: a run is one fit of one "
            "model. Give each fit a run of its own, by a script of its own under `diloco run`; or let each learner "
            'train alone in the second one, with another strategy, such as Trainer(strategy="auto"). validate, test '
            "and predict need no run"
        )


def check_hosts(num_nodes: int) -> None:
    """Compare the nodes of the Trainer with the hosts of this learner. If they differ, this process ends with code 2.

    Raises:
        ConfigError: they differ.
    """
    num_hosts = os.environ.get("DILOCO_NUM_HOSTS")
    if num_hosts is not None and num_hosts != str(num_nodes):
        hard_exit(2)
        raise ConfigError(
            f"Trainer(num_nodes={num_nodes}) in a learner of {num_hosts} host(s): each host runs one node of the "
            f"Trainer; pass Trainer(num_nodes={num_hosts}), or `diloco run --hosts-per-learner {num_nodes}`"
        )


def note_last_step(config: LearnerConfig) -> None:
    """Note that a fit of this process has made its last step in the run that it joined, if it joined one."""
    if (address := given_address(config)) is not None:
        _done.add(address.run)
