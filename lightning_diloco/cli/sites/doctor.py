"""`diloco doctor`: checks whether a machine can take part in a run, and whether its link is fast enough for a recipe.

1. At a learner's site, DILOCO_JOIN (or --join) names the run. Each check prints a finding, and most checks pass or
   fail. If a check fails, the exit code is 1.
2. The syncer, each of its shards and its standby must be reachable. If the standby has taken over, it is the syncer.
3. With a recipe, the slowest measured link is compared with the recipe's traffic, by the forecast of `diloco plan`.
   With shards, this asks for more than needed: each link has only a part of the traffic.
4. On the syncer's machine, without a join string or with --run-dir alone, it prints the options of `diloco plan` that
   describe the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_diloco import __version__
from lightning_diloco.cli import recipes
from lightning_diloco.cli.plan import forecast_of
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.config import PROTOCOL_VERSION
from lightning_diloco.errors import ConfigError, DiLoCoError, StandbyError
from lightning_diloco.process.machine import cores_here, interface_of, memory_here
from lightning_diloco.transport.address import JoinAddress, address_from, placed

if TYPE_CHECKING:
    from lightning_diloco.cli.sites.measure import Link

_EXAMPLE = """examples:
  DILOCO_JOIN=$(cat join) diloco doctor llama/1b
  diloco doctor --run-dir runs/mine"""
SKEW_S = 60.0  # certificates and logs hold times
_REACH_S = 10.0
_ANSWER_S = 5.0  # of a shard or a standby


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
    parser.add_argument(
        "--join", metavar="JOIN", help="join string, or a file with it (default: DILOCO_JOIN; without: syncer's side)"
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder whose disk is measured (default: this one); without --join and RECIPE: the syncer's side",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Print the findings; return 1 if a check fails."""
    run_dir = arguments.run_dir or Path()
    if not run_dir.is_dir():
        raise ConfigError(f"--run-dir {run_dir}: no such folder; name one on the disk to measure")
    recipe = None if arguments.target is None else recipes.resolve(arguments.target)
    if recipe is not None and recipe.suffix == ".py":
        raise ConfigError(f"{recipe} is a script; only a YAML recipe can be read without running it")
    address = _address(arguments)
    if address is None and recipe is not None:
        raise ConfigError("a recipe's traffic is compared with the link to a syncer; set DILOCO_JOIN or --join")
    found = _syncer(run_dir) if address is None else _learner(address, recipe, run_dir)
    checks: list[Check] = []
    for check in found:
        checks.append(check)
        if not arguments.json:
            _print(check)
    is_good = all(check.is_good is not False for check in checks)
    if arguments.json:
        print(json.dumps({"checks": [asdict(check) for check in checks], "is_good": is_good}, indent=2))
    return 0 if is_good else 1


def _address(arguments: argparse.Namespace) -> JoinAddress | None:
    """Return the address of the run at a learner's site; None on the syncer's machine."""
    if arguments.join is not None:
        return address_from(arguments.join)
    if arguments.run_dir is not None and arguments.target is None:
        return None
    join = os.environ.get("DILOCO_JOIN")
    return None if join is None else JoinAddress.parse(join)


def _print(check: Check) -> None:
    verdict = {True: "ok   ", False: "FAILS", None: "     "}[check.is_good]
    print(f"{verdict} {check.name + ':':22} {check.found}", flush=True)


def _syncer(run_dir: Path) -> Iterator[Check]:
    """Yield the options of `diloco plan` for this machine."""
    from lightning_diloco.cli.sites import measure

    cores, memory = cores_here(), measure.memory_bytes_per_s(cores_here())
    disk = measure.disk_bytes_per_s(run_dir)
    yield from _machine(run_dir, memory)
    options = f"--syncer-cores {cores} --syncer-memory-rate {memory / 1e9:.0f}GB --disk-rate {disk / 1e6:.0f}MB"
    yield Check("for diloco plan", options)


def _learner(address: JoinAddress, recipe: Path | None, run_dir: Path) -> Iterator[Check]:
    """Yield the checks of a learner's site; if no syncer serves the run, later checks are left out."""
    from lightning_diloco.cli.sites import measure

    yield from _machine(run_dir, measure.memory_bytes_per_s(cores_here()))
    checks, status = _syncer_at(address)
    other = address.standby
    if status is None and other is not None:  # has the standby taken over?
        more, status = _syncer_at(address.swapped())
        if status is None:
            checks.append(Check("standby", more[-1].found, is_good=False))
        else:
            told = f"{checks[-1].found}; the run is served at {other} instead, and learners use that"
            checks, address, other = [Check("first address", told), *more], address.swapped(), None
    yield from checks
    if status is None:
        return
    if other := (status.get("standby") or {}).get("address") or other:
        yield _standby(placed(address, other))
    yield from _links(address, status.get("shards", ()), recipe)


def _machine(run_dir: Path, memory_bytes_per_s: float) -> Iterator[Check]:
    free = shutil.disk_usage(run_dir).free
    memory = f"{memory_here() / 2**30:.0f} GiB of memory at {memory_bytes_per_s / 1e9:.1f} GB/s"
    yield Check("this machine", f"{cores_here()} cores, {memory}")
    yield Check("disk", f"{free / 2**30:.0f} GiB free in {run_dir.resolve()}")


def _syncer_at(address: JoinAddress) -> tuple[list[Check], dict[str, Any] | None]:
    """Return the checks of the syncer at this address, and its status; None if it does not serve the run."""
    from lightning_diloco.transport.flight import FlightConnection

    try:
        checks = [Check("syncer", _reached(address, _REACH_S), is_good=True)]
    except OSError as error:
        return [Check("syncer", f"{address.host_port} cannot be reached: {error}", is_good=False)], None
    connection = FlightConnection(address)
    try:
        began_s = time.time()
        status = connection.status()
        middle_s = (began_s + time.time()) / 2
    except DiLoCoError as error:
        return [*checks, Check("syncer's answer", str(error), is_good=False)], None
    finally:
        connection.close()
    return [*checks, Check("token and certificate", "accepted", is_good=True), *_agreement(status, middle_s)], status


def _reached(address: JoinAddress, within_s: float) -> str:
    """Connect, and return where to and where from. Raises `OSError`."""
    with socket.create_connection((address.host, address.port), timeout=within_s) as line:
        here, there = line.getsockname()[0], line.getpeername()[0]
    name = interface_of(here)
    return f"{address.host_port} at {there}, reached from {here}" + (f" ({name})" if name else "")


def _standby(address: JoinAddress) -> Check:
    """Check that the standby answers that it is one."""
    from lightning_diloco.transport.flight import FlightConnection

    connection = FlightConnection(address, control_deadline_s=_ANSWER_S)
    try:
        reached = _reached(address, _ANSWER_S)
        connection.status()
    except StandbyError:
        return Check("standby", reached, is_good=True)
    except (OSError, DiLoCoError) as error:
        found = f"{address.host_port} cannot be used; a learner here cannot go on if the syncer fails: {error}"
        return Check("standby", found, is_good=False)
    finally:
        connection.close()
    return Check("standby", f"{address.host_port} serves the run as well; one of the two must end", is_good=False)


def _agreement(status: dict[str, Any], here_s: float) -> Iterator[Check]:
    """Compare versions and clocks."""
    there = status.get("protocol", "unknown")
    is_good = there == PROTOCOL_VERSION
    yield Check("protocol", f"version {there} there, {PROTOCOL_VERSION} here ({__version__})", is_good=is_good)
    if "clock_s" in status:
        skew_s = status["clock_s"] - here_s
        yield Check("clock", f"the syncer's is {skew_s:+.1f} s from this one", is_good=abs(skew_s) <= SKEW_S)
    yield Check("run", f"{status['state']}, {len(status['learners'])} learners")


def _links(address: JoinAddress, shards: Sequence[dict[str, Any]], recipe: Path | None) -> Iterator[Check]:
    """Measure the links to the syncer and to each shard, and compare the slowest with the recipe's traffic."""
    try:
        links = [_link(address, _REACH_S)]
    except DiLoCoError as error:
        yield Check("syncer's answer", str(error), is_good=False)
        return
    yield Check("round trip", f"{1e3 * links[0].round_trip_s:.1f} ms")
    for way, rate in (("up", links[0].up), ("down", links[0].down)):
        yield Check(way, f"{8e-6 * rate.bytes_per_s:.0f} Mbit/s with {rate.num_streams} stream(s)")
    for shard in shards:
        name, place = f"shard {shard['shard']}", shard.get("address")
        if not place:
            yield Check(name, "the syncer does not say where it listens; learners wait for it", is_good=False)
            continue
        try:
            links.append(link := _link(placed(address, place), _ANSWER_S))
        except DiLoCoError as error:
            yield Check(name, str(error), is_good=False)
            continue
        up, down = (f"{8e-6 * rate.bytes_per_s:.0f} Mbit/s" for rate in (link.up, link.down))
        found = f"{placed(address, place).host_port}: round trip {1e3 * link.round_trip_s:.1f} ms, up {up}, down {down}"
        yield Check(name, found, is_good=True)
    if recipe is not None:
        yield from _traffic(recipe, links)


def _link(address: JoinAddress, within_s: float) -> Link:
    """Measure the link to the syncer or a shard, which must answer within this time. Raises `DiLoCoError`."""
    from lightning_diloco.cli.sites.measure import Way
    from lightning_diloco.transport.flight import FlightConnection

    connection = FlightConnection(address, control_deadline_s=within_s)
    try:
        connection.status()
        return Way(connection).measured()
    finally:
        connection.close()


def _traffic(recipe: Path, links: Sequence[Link]) -> Iterator[Check]:
    """Compare the recipe's traffic with the slowest link, as if all fragments used it."""
    from lightning_diloco.planner.bandwidth import LINK_SHARE
    from lightning_diloco.planner.fixes import cheapest_fix
    from lightning_diloco.planner.plan import OVERLAP, gib

    slowest_bytes_per_s = min(rate.bytes_per_s for link in links for rate in (link.up, link.down))
    # The measured rate is that of streams, including the syncer's link. The forecast takes a share of a link's rate.
    machines = {
        "link_bps": 8 * slowest_bytes_per_s / LINK_SHARE,
        "syncer_link_bps": float("inf"),
        "rtt_s": max(link.round_trip_s for link in links),
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
