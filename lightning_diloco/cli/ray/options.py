"""The options of `diloco run --engine ray`, and their checks that do not need Ray."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Mapping

VALUED = ("--engine", "--learners", "--address", "--resources-per-learner")
_NEEDED = ("learners", "address", "resources_per_learner")
_NO_RAY = "--engine ray: Ray is not installed; pip install 'lightning-diloco[ray]', on all nodes of the cluster"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    options = parser.add_argument_group("on a cluster", "one syncer and N learners, placed and restarted by an engine")
    options.add_argument("--engine", choices=["ray"], help="what places them")
    options.add_argument("--learners", type=int, metavar="N", help="number of learners")
    options.add_argument(
        "--address", metavar="HOST:PORT", help="address of the Ray head (default: a cluster of this machine is started)"
    )
    options.add_argument(
        "--resources-per-learner", metavar="JSON", help="such as '{\"GPU\": 8}' (default and minimum: '{\"CPU\": 1}')"
    )


def problems(arguments: argparse.Namespace) -> list[str]:
    """Return problems with these options."""
    if arguments.engine is None:
        given = [f"--{name.replace('_', '-')}" for name in _NEEDED if getattr(arguments, name) is not None]
        return [f"{', '.join(given)}: only with --engine ray"] if given else []
    found = []
    if importlib.util.find_spec("ray") is None:
        found.append(_NO_RAY)
    if arguments.local is not None:
        found.append(
            f"--local {arguments.local} together with --engine {arguments.engine}: learners run either on this machine "
            "or on a cluster; give --local N, or --engine ray --learners N"
        )
    if arguments.learners is None:
        found.append("--learners N is missing: pass the number of learners; for example --learners 4")
    elif arguments.learners < 1:
        found.append(f"--learners {arguments.learners}: must be at least 1")
    if arguments.address is not None and "://" in arguments.address:
        found.append(
            f"--address {arguments.address}: must be HOST:PORT of a Ray head, without a scheme; start `diloco run` on "
            "a machine of the cluster, which sees the run directory"
        )
    if arguments.run_dir is not None and ":/" in str(arguments.run_dir):
        found.append(
            f"--run-dir {arguments.run_dir}: must be a path that all nodes mount, because the syncer's log and locks "
            "need a file system; for checkpoints in a bucket, give learners a checkpoint_store"
        )
    try:
        needs(arguments.resources_per_learner)
    except ValueError as error:
        found.append(str(error))
    return found


def needs(text: str | None) -> Mapping[str, float]:
    """Return the resources of a learner.

    Raises:
        ValueError: they are not JSON, or not amounts.
    """
    try:
        given = json.loads(text or "{}")
    except ValueError:
        given = None
    if not isinstance(given, dict) or not all(_is_amount(amount) for amount in given.values()):
        raise ValueError(
            f"--resources-per-learner {text}: must be a JSON object of names and amounts above 0, such as "
            '\'{"GPU": 8}\' or \'{"CPU": 4, "GPU": 1}\''
        )
    return {"CPU": 1, **given}


def _is_amount(amount: object) -> bool:
    return isinstance(amount, (int, float)) and not isinstance(amount, bool) and 0 < amount < math.inf
