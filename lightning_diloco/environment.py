"""The environment variables that are read here. There are no others, and an explicit argument always wins.

1. Each is read where and when it is used, never on import. A test compares `read_in` with the code.
2. None is written: what a child process should see is handed to it. (Lightning hands its own environment to ranks it
   starts: for that moment the learner's id is in it. And a syncer keeps gRPC's log to errors, which no call can.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable.

    Args:
        meaning: for people, one line.
        read_in: modules that read it, as paths below the package.
    """

    meaning: str
    read_in: tuple[str, ...]


VARIABLES = {
    "DILOCO_HOST": Variable("name under which learners reach this machine", ("syncer/front.py",)),
    "DILOCO_JOIN": Variable(
        "join string of the run to take part in",
        ("cli/status.py", "learner/link.py", "strategy/identity.py"),
    ),
    "DILOCO_LEARNER": Variable(
        "id of this learner; default: one is made up",
        ("learner/link.py", "strategy/identity.py", "strategy/backends/launchers.py", "strategy/backends/ranks.py"),
    ),
    "DILOCO_RUN_DIR": Variable(
        "run directory, in which this learner has a folder", ("learner/link.py", "strategy/trainer/paths.py")
    ),
    "GRPC_VERBOSITY": Variable("what gRPC logs; default for a syncer: ERROR", ("process/grpc_log.py",)),
    "OMP_NUM_THREADS": Variable("threads of a learner; default: cores / learners", ("cli/local/run.py",)),
    "PJRT_DEVICE": Variable("platform of XLA devices, TPU or CPU", ("strategy/backends/xla_accelerator.py",)),
    "XDG_CACHE_HOME": Variable(
        "where texts and graphs lie; default: ~/.cache", ("devices/xla/ops.py", "hf/text_data.py")
    ),
    "XLA_PERSISTENT_CACHE_PATH": Variable("where compiled XLA graphs are kept", ("devices/xla/ops.py",)),
}
"""Every variable by name."""

WHOLE_IN = (
    "cli/fit.py",
    "cli/local/fleet.py",
    "learner/embedded_syncer.py",
    "process/grpc_log.py",
    "strategy/backends/launchers.py",
)
"""Modules that take all of it: for the arguments of a learner, and for child processes."""
