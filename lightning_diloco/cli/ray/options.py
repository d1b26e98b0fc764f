"""The options of `diloco run --engine ray`, and their checks that do not need Ray."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path

from lightning_diloco.errors import ConfigError

VALUED = ("--engine", "--learners", "--address", "--resources-per-learner", "--hosts-per-learner")
_NEEDED = ("learners", "address", "resources_per_learner", "hosts_per_learner")
_NUM_NODES = "--trainer.num_nodes"
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
        "--resources-per-learner",
        metavar="JSON",
        help="on each of its hosts, such as '{\"GPU\": 8}' (default and minimum: '{\"CPU\": 1}')",
    )
    options.add_argument(
        "--hosts-per-learner",
        type=int,
        metavar="H",
        help="nodes that share a learner (default: 1); a recipe gets --trainer.num_nodes H, a script must pass "
        "Trainer(num_nodes=H)",
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
    if arguments.hosts_per_learner is not None and arguments.hosts_per_learner < 1:
        found.append(f"--hosts-per-learner {arguments.hosts_per_learner}: must be at least 1")
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


def layout(arguments: argparse.Namespace, target: Path) -> list[str]:
    """Return a recipe's arguments that give its Trainer the number of hosts; a script passes them itself.

    Raises:
        ConfigError: the recipe or its arguments say another number.
    """
    if arguments.engine is None or target.suffix == ".py":
        return []
    num_hosts = arguments.hosts_per_learner or 1
    words = [part for word in arguments.passed_on for part in word.split("=", 1)]
    given = [value for name, value in itertools.pairwise(words) if name == _NUM_NODES]
    found = given[-1] if given else _num_nodes_of(target)
    if found is not None and str(found) != str(num_hosts):
        raise ConfigError(
            f"{_NUM_NODES} is {found} {'on the command line' if given else f'in {target}'}, but --hosts-per-learner is "
            f"{num_hosts}: each node of a Trainer is a host; pass the same number for both"
        )
    return [_NUM_NODES, str(num_hosts)] if num_hosts > 1 else []


def _num_nodes_of(recipe: Path) -> object:
    import yaml

    try:
        content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        return None  # the learners say what is wrong
    trainer = content.get("trainer") if isinstance(content, dict) else None
    return trainer.get("num_nodes") if isinstance(trainer, dict) else None


def needs(text: str | None) -> Mapping[str, float]:
    """Return the resources of a learner on each of its hosts.

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
