"""`diloco doctor`: checks whether a machine can take part in a run, and whether its link is fast enough for a recipe.

1. At a learner's site, DILOCO_JOIN (or --join) names the run. Each check prints a finding, and most checks pass or
   fail. If a check fails, the exit code is 1.
2. With a recipe, the measured link is compared with the recipe's traffic, by the forecast of `diloco plan`.
3. On the syncer's machine, without a join string, it prints the options of `diloco plan` that describe the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_diloco import __version__
from lightning_diloco.cli import recipes
from lightning_diloco.cli.plan import forecast_of
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.config import PROTOCOL_VERSION
from lightning_diloco.errors import ConfigError, DiLoCoError
from lightning_diloco.process.machine import cores_here, memory_here
from lightning_diloco.transport.address import JoinAddress

if TYPE_CHECKING:
    from lightning_diloco.cli.sites.measure import Rate, Way

_EXAMPLE = """examples:
  DILOCO_JOIN=$(cat join) diloco doctor llama/1b
  diloco doctor --run-dir runs/mine"""
SKEW_S = 60.0  # certificates and logs hold times
_REACH_S = 10.0


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        name: name of the check.
        found: the finding.
        is_good: whether the check passed; None: it only informs.
    """

    name: str
    found: str
    is_good: bool | None = None


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "check whether this machine can take part in a run: link, token, clock, versions, memory, disk"
    parser = add_verb(verbs, "doctor", about, _EXAMPLE)
    parser.add_argument("target", nargs="?", metavar="RECIPE", help="a YAML recipe, whose traffic is compared")
    parser.add_argument("--join", metavar="JOIN", help="join string (default: DILOCO_JOIN; without: the syncer's side)")
    parser.add_argument(
        "--run-dir", type=Path, default=Path(), metavar="DIR", help="folder whose disk is measured (this one)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Print the findings; return 1 if a check fails."""
    if not arguments.run_dir.is_dir():
        raise ConfigError(f"--run-dir {arguments.run_dir}: no such folder; name one on the disk to measure")
    recipe = None if arguments.target is None else recipes.resolve(arguments.target)
    if recipe is not None and recipe.suffix == ".py":
        raise ConfigError(f"{recipe} is a script; only a YAML recipe can be read without running it")
    join = arguments.join or os.environ.get("DILOCO_JOIN")
    if join is None and recipe is not None:
        raise ConfigError("a recipe's traffic is compared with the link to a syncer; set DILOCO_JOIN or --join")
    found = _syncer(arguments.run_dir) if join is None else _learner(JoinAddress.parse(join), recipe, arguments.run_dir)
    checks: list[Check] = []
    for check in found:
        checks.append(check)
        if not arguments.json:
            _print(check)
    is_good = all(check.is_good is not False for check in checks)
    if arguments.json:
        print(json.dumps({"checks": [asdict(check) for check in checks], "is_good": is_good}, indent=2))
    return 0 if is_good else 1


def _print(check: Check) -> None:
    verdict = {True: "ok   ", False: "FAILS", None: "     "}[check.is_good]
    print(f"{verdict} {check.name + ':':22} {check.found}", flush=True)


def _syncer(run_dir: Path) -> Iterator[Check]:
    """Yield the options of `diloco plan` for this machine."""
    from lightning_diloco.cli.sites import measure

    cores, memory = cores_here(), measure.memory_bytes_per_s(cores_here())
    disk = measure.disk_bytes_per_s(run_dir)
    yield from _machine(run_dir)
    options = f"--syncer-cores {cores} --syncer-memory-rate {memory / 1e9:.0f}GB --disk-rate {disk / 1e6:.0f}MB"
    yield Check("for diloco plan", options)


def _learner(address: JoinAddress, recipe: Path | None, run_dir: Path) -> Iterator[Check]:
    """Yield the checks of a learner's site; if the syncer cannot be reached, later checks are left out."""
    from lightning_diloco.cli.sites.measure import Way
    from lightning_diloco.transport.flight import FlightConnection

    yield from _machine(run_dir)
    try:
        with socket.create_connection((address.host, address.port), timeout=_REACH_S) as line:
            here, there = line.getsockname()[0], line.getpeername()[0]
    except OSError as error:
        yield Check("syncer", f"{address.host}:{address.port} cannot be reached: {error}", is_good=False)
        return
    yield Check("syncer", f"{address.host}:{address.port} at {there}, reached from {here}", is_good=True)
    connection = FlightConnection(address)
    try:
        began_s = time.time()
        status = connection.status()
        middle_s = (began_s + time.time()) / 2
        yield Check("token and certificate", "accepted", is_good=True)
        yield from _agreement(status, middle_s)
        yield from _link(Way(connection), recipe)
    except DiLoCoError as error:
        yield Check("syncer's answer", str(error), is_good=False)
    finally:
        connection.close()


def _machine(run_dir: Path) -> Iterator[Check]:
    free = shutil.disk_usage(run_dir).free
    yield Check("this machine", f"{cores_here()} cores, {memory_here() / 2**30:.0f} GiB of memory")
    yield Check("disk", f"{free / 2**30:.0f} GiB free in {run_dir.resolve()}")


def _agreement(status: dict[str, Any], here_s: float) -> Iterator[Check]:
    """Compare versions and clocks."""
    there = status.get("protocol", "unknown")
    is_good = there == PROTOCOL_VERSION
    yield Check("protocol", f"version {there} there, {PROTOCOL_VERSION} here ({__version__})", is_good=is_good)
    if "clock_s" in status:
        skew_s = status["clock_s"] - here_s
        yield Check("clock", f"the syncer's is {skew_s:+.1f} s from this one", is_good=abs(skew_s) <= SKEW_S)
    yield Check("run", f"{status['state']}, {len(status['learners'])} learners")


def _link(way: Way, recipe: Path | None) -> Iterator[Check]:
    round_trip_s = way.round_trip_s()
    yield Check("round trip", f"{1e3 * round_trip_s:.1f} ms")
    up, down = way.up(), way.down()
    for name, rate in (("up", up), ("down", down)):
        yield Check(name, f"{8e-6 * rate.bytes_per_s:.0f} Mbit/s with {rate.num_streams} stream(s)")
    if recipe is not None:
        yield from _traffic(recipe, round_trip_s, min(up, down, key=lambda rate: rate.bytes_per_s))


def _traffic(recipe: Path, round_trip_s: float, rate: Rate) -> Iterator[Check]:
    """Compare the recipe's traffic with the link."""
    from lightning_diloco.planner.bandwidth import LINK_SHARE
    from lightning_diloco.planner.fixes import cheapest_fix
    from lightning_diloco.planner.plan import OVERLAP, gib

    # The measured rate is that of streams, including the syncer's link. The forecast takes a share of a link's rate.
    machines = {
        "link_bps": 8 * rate.bytes_per_s / LINK_SHARE,
        "syncer_link_bps": float("inf"),
        "rtt_s": round_trip_s,
    }
    _, found = forecast_of(recipe, machines)
    exchange, step_s = found.exchange, found.scenario.fleet.step_s
    yield Check(
        "a fragment",
        f"{gib(found.sizes.nbytes)}: up {exchange.upload_s:.2f} s, down {exchange.download_s:.2f} s; "
        f"one every {exchange.period_s:.2f} s, steps of {step_s:g} s",
    )
    judged = [resource for resource in found.resources if resource.name in ("learner's link", OVERLAP)]
    for resource in judged:
        yield Check(resource.name, f"{resource.load or 0:.0%} in use: {resource.needed}", is_good=resource.is_enough)
    if not all(resource.is_enough for resource in judged) and (fix := cheapest_fix(found)) is not None:
        yield Check("what would help", fix.text)
