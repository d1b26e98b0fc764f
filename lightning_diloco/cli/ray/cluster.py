"""The calls to Ray: connect, check what the cluster has, place a process.

1. `diloco run` is connected only during these calls, because Ray ends a process that is connected to a lost cluster.
   Actors and placement groups are detached, so they do not end with the connection. Only an embedded cluster keeps its
   connection, because it would end with it.
2. All checks are made before the first process starts: the address, the resources, and on each node the package, the
   recipe and the shared run directory.

Source: our choice.
"""

from __future__ import annotations

import logging
import math
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError, RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from lightning_diloco import __version__
from lightning_diloco.cli.ray.files import FOLDER, host_names, write_in_place
from lightning_diloco.cli.ray.host import Host
from lightning_diloco.errors import ConfigError

Resources = Mapping[str, float]

SYNCER_NEEDS: Resources = {"CPU": 1}
_NAMESPACE = "lightning_diloco"
_EMBEDDED_CPUS = 1000  # all processes share this machine, as with --local
_HEALTH_S, _NODE_S = 30.0, 60.0
_TOKEN = "token"


@contextmanager
def embedded() -> Iterator[str]:
    """Run a cluster of this machine during the block, and yield its address."""
    with _own_signals():
        ray.init(address="local", num_cpus=_EMBEDDED_CPUS, include_dashboard=False, **_OPTIONS)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


@contextmanager
def connected(address: str) -> Iterator[str]:
    """Connect to a cluster for the block, and yield its address; within `embedded`, the connection already exists.

    Raises:
        ConfigError: there is no Ray head.
    """
    if ray.is_initialized():
        yield address
        return
    if address != "auto":  # the cluster of this machine
        check_head(address)
    try:
        with _own_signals():
            ray.init(address=address, **_OPTIONS)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--address {address}: Ray refused the connection: {error}") from error
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


_OPTIONS: dict[str, Any] = {"namespace": _NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the signal handlers of this process; Ray sets its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_head(address: str) -> None:
    """Check that a Ray head answers at this address; otherwise `ray.init` would wait for minutes.

    Raises:
        ConfigError: there is none, or it refuses this machine's token.
    """
    words = (sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address)
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=_HEALTH_S, check=False)
    except subprocess.TimeoutExpired:
        found = None
    if found is not None and AuthenticationError.__name__ in found.stderr:
        raise ConfigError(
            f"--address {address}: the Ray head refused the token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the "
            "cluster's token unless ~/.ray/auth_token contains it (`ray get-auth-token` prints it)"
        )
    if found is None or found.returncode:
        raise ConfigError(
            f"--address {address}: no Ray head answers there; it must be HOST:PORT as `ray start --head` prints it, "
            "such as 10.0.0.1:6379; without --address, a cluster of this machine is started"
        )


def check_room(needs: Resources, num_learners: int, num_hosts: int = 1) -> None:
    """Check that the nodes of the cluster have enough resources, whether or not they are free.

    Args:
        needs: resources of a learner on each of its hosts.
        num_learners: number of learners.
        num_hosts: number of hosts of a learner, which are different nodes.

    Raises:
        ConfigError: there are too few resources.
    """
    nodes = _nodes()
    have = [dict(node["Resources"]) for node in nodes]
    fits = [_fits(each, needs) for each in have]
    beside = [_fits(_without(each, SYNCER_NEEDS), needs) for each in have]  # the syncer
    can_serve = [_fits(each, SYNCER_NEEDS) > 0 for each in have]
    rooms = [_room([*fits[:k], beside[k], *fits[k + 1 :]], num_hosts) for k, can in enumerate(can_serve) if can]
    if (room := max(rooms, default=0)) < num_learners:
        where, options = "each", "--resources-per-learner"
        if num_hosts > 1:
            where, options = f"on each of {num_hosts} nodes", f"{options} or --hosts-per-learner"
        there = "; ".join(f"{node['NodeManagerAddress']} has {_there(node, needs)}" for node in nodes)
        raise ConfigError(
            f"{num_learners} learner(s) need {_said(needs)} {where}, and the syncer {_said(SYNCER_NEEDS)}; the cluster "
            f"has room for {room} learner(s): {there}; ask for fewer learners, change {options}, or add nodes"
        )


def check_nodes(run_dir: Path, target: Path) -> None:
    """Check that each node can run a learner: it must have the package, the recipe, and the run directory.

    Raises:
        ConfigError: a node lacks something; the message names all of them.
    """
    token = secrets.token_hex(8)
    write_in_place(run_dir / FOLDER / _TOKEN, token)
    asked = {}
    for node in _nodes():
        at = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        look = ray.remote(_problems_here).options(num_cpus=0, max_retries=0, scheduling_strategy=at)
        where = f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})"
        asked[look.remote(str(run_dir), token, str(target), str(Path.cwd()), __version__)] = where
    found = []
    for answer, where in asked.items():
        try:
            found += [f"node {where}: {problem}" for problem in ray.get(answer, timeout=_NODE_S)]
        except RayError as error:
            (why, *_) = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            found.append(f"node {where} cannot run lightning_diloco {__version__}: {why}; install it there")
    if found:
        raise ConfigError(found)


def _problems_here(run_dir: str, token: str, target: str, cwd: str, version: str) -> list[str]:
    """Return what this node lacks."""
    found = []
    if version != __version__:
        found.append(f"has lightning_diloco {__version__}, not {version}; install the same version on all nodes")
    try:
        seen = (Path(run_dir) / FOLDER / _TOKEN).read_text(encoding="utf-8")
        mine = Path(run_dir) / FOLDER / f"{_TOKEN}-{secrets.token_hex(4)}"
        mine.touch()
        mine.unlink()
    except OSError as error:
        seen = error.strerror or "?"
    if seen != token:
        found.append(
            f"--run-dir {run_dir} is not shared with it ({'another folder' if len(seen) == len(token) else seen}); "
            "choose a folder on a disk that all nodes mount at the same path"
        )
    if missing := [path for path in (target, cwd) if not Path(path).exists()]:
        found.append(f"{', '.join(missing)} does not exist there; the recipe and the working directory must")
    return found


def place(
    known_as: str, name: str, run_dir: Path, needs: Resources, *, in_group: bool = False, num_hosts: int = 1
) -> None:
    """Let Ray choose the nodes for a process and start it there, now or when there is room.

    Args:
        known_as: name of the actor on host 0 and of the placement group, unique in the cluster.
        name: name of the process.
        run_dir: RUN_DIR.
        needs: resources of the process on each host.
        in_group: whether it gets a placement group.
        num_hosts: number of its hosts, which are different nodes; more than one only in a group.
    """
    options: dict[str, Any] = {}
    if in_group:
        strategy = "STRICT_PACK" if num_hosts == 1 else "STRICT_SPREAD"
        group = placement_group([dict(needs)] * num_hosts, strategy=strategy, name=known_as, lifetime="detached")
    for rank, (actor, host) in enumerate(
        zip(host_names(known_as, num_hosts), host_names(name, num_hosts), strict=True)
    ):
        if in_group:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        ray.remote(Host).options(
            name=actor,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=needs.get("CPU", 0),
            num_gpus=needs.get("GPU", 0),
            resources={other: amount for other, amount in needs.items() if other not in ("CPU", "GPU")},
            **options,
        ).remote(str(run_dir), host, actor)


def release(names: Sequence[str]) -> None:
    """Remove the processes with these names from Ray, so that Ray does not start them again."""
    for known_as in names:
        with suppress(ValueError):  # it is gone
            ray.kill(ray.get_actor(known_as), no_restart=True)
        with suppress(ValueError):
            remove_placement_group(ray.util.get_placement_group(known_as))


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _fits(have: Resources, needs: Resources) -> int:
    return min((math.floor(have.get(name, 0.0) / amount) for name, amount in needs.items()), default=0)


def _room(fits: Sequence[int], num_hosts: int) -> int:
    """Return the number of learners of `num_hosts` nodes, if these numbers of their processes fit on the nodes."""
    most = range(sum(fits) // num_hosts, 0, -1)
    return next((room for room in most if sum(min(each, room) for each in fits) >= room * num_hosts), 0)


def _there(node: Mapping[str, Any], needs: Resources) -> str:
    return _said({name: node["Resources"].get(name, 0.0) for name in sorted({"CPU", *needs})})


def _without(have: Resources, taken: Resources) -> dict[str, float]:
    return {name: amount - taken.get(name, 0.0) for name, amount in have.items()}


def _said(needs: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
