"""All environment variables that this package reads. An explicit argument always takes precedence.

1. Each variable is read where and when it is used, never on import. A test compares `read_in` with the code.
2. The package does not set variables in its own process; it passes them to child processes. There are four exceptions.
   The learner id is set while Lightning starts ranks, because they inherit Lightning's environment. gRPC's log level is
   set in a syncer, and Ray's token mode in `diloco scale`, because no call can set them. torch_tpu sets what its ranks
   need in the process that starts them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable.

    Args:
        meaning: description in one line.
        read_in: modules that read it, as paths below the package.
    """

    meaning: str
    read_in: tuple[str, ...]


VARIABLES = {
    "DILOCO_HOST": Variable("host name by which learners reach this machine", ("syncer/front.py",)),
    "DILOCO_JOIN": Variable(
        "join string of the run",
        ("cli/fit.py", "cli/sites/doctor.py", "cli/status.py", "learner/name.py"),
    ),
    "DILOCO_LEARNER": Variable(
        "id of this learner; default: host name and a slot",
        ("learner/member.py", "strategy/identity.py", "strategy/backends/launchers.py", "strategy/backends/ranks.py"),
    ),
    "DILOCO_NUM_HOSTS": Variable(
        "number of hosts of this learner, under `diloco run --engine ray`", ("strategy/identity.py",)
    ),
    "DILOCO_RUN_DIR": Variable(
        "run directory, which contains this learner's folder", ("learner/whereabouts.py", "strategy/trainer/paths.py")
    ),
    "DILOCO_SITE": Variable("site of this learner, by which status and live page group learners", ("learner/join.py",)),
    "GRPC_VERBOSITY": Variable("log level of gRPC; default for a syncer: ERROR", ("process/grpc_log.py",)),
    "OMP_NUM_THREADS": Variable("threads of a learner; default: cores / learners", ("cli/local/run.py",)),
    "PJRT_DEVICE": Variable("platform of XLA devices, TPU or CPU", ("strategy/backends/xla_accelerator.py",)),
    "RAY_AUTH_MODE": Variable("token mode of the Ray cluster, token or disabled", ("cli/ray/fleet.py",)),
    "XDG_CACHE_HOME": Variable(
        "cache folder of texts and graphs; default: ~/.cache", ("devices/xla/ops.py", "hf/text_data.py")
    ),
    "XLA_PERSISTENT_CACHE_PATH": Variable("cache folder of compiled XLA graphs", ("devices/xla/ops.py",)),
}
"""Every variable by name."""

WHOLE_IN = (
    "cli/fit.py",
    "cli/local/fleet.py",
    "cli/ray/files.py",
    "learner/embedded_syncer.py",
    "process/grpc_log.py",
    "strategy/backends/launchers.py",
    "strategy/backends/torch_tpu.py",
)
"""Modules that read the whole environment, for a learner's arguments and for child processes, or set a variable."""
