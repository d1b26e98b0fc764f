"""A run on a Ray cluster: the same stages as on one machine (cli/local/run.py), with processes on its nodes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from lightning_diloco.cli.local.display import Screen
from lightning_diloco.cli.local.interruption import Interruption
from lightning_diloco.cli.local.run import Ended, Plan, execute
from lightning_diloco.cli.ray.cluster import Resources, check_nodes, check_room, connected, embedded
from lightning_diloco.cli.ray.files import Wanted, Wants, make_folder
from lightning_diloco.cli.ray.fleet import RayFleet
from lightning_diloco.errors import ConfigError


def execute_on_ray(
    plan: Plan,
    target: Path,
    screen: Screen,
    interruption: Interruption,
    *,
    address: str | None,
    needs: Resources,
    num_hosts: int,
) -> Ended:
    """Run a plan to its end. Call it from the main thread only.

    Args:
        plan: the run; its run directory is on a disk that all nodes mount. If it is served, its processes are taken
            over, without Ray.
        target: path of the recipe or script.
        screen: display of the run.
        interruption: ends the run when this process gets a signal.
        address: of the Ray head; None: a cluster of this machine is started, and ended after the run.
        needs: resources of a learner on each of its hosts.
        num_hosts: number of hosts of a learner.

    Raises:
        ConfigError: the cluster cannot hold the run.
    """
    if plan.is_served and (wants := Wanted(plan.run_dir).read()) is not None:
        screen.say("this run goes on without its `diloco run`: its processes are taken over, with their commands")
        fleet = RayFleet(plan, wants, say=screen.say)
        return execute(plan, screen, interruption, fleet=fleet)
    if address is None and num_hosts > 1:
        raise ConfigError(f"--hosts-per-learner {num_hosts}: a cluster of this machine has one node; pass --address")
    make_folder(plan.run_dir)
    with embedded() if address is None else nullcontext(address) as given:
        with connected(given) as head:
            check_room(needs, plan.num_learners, num_hosts)
            check_nodes(plan.run_dir, target)
        fleet = RayFleet(plan, Wants(plan.num_learners, head, needs, num_hosts), say=screen.say)
        return execute(plan, screen, interruption, fleet=fleet)
