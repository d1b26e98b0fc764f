"""`diloco plan`: forecasts memory, links, time and disk of a recipe, and whether it fits, without starting it.

Options describe the machines and links. A recipe can set its own options in a comment line, `# plan: --learners 8
--link 5Gbit ...`. The command line takes precedence.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_diloco.cli import recipes
from lightning_diloco.cli.local.collector import kept
from lightning_diloco.cli.text.quantities import bits, nbytes, seconds, share
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.config import RunConfig
from lightning_diloco.errors import ConfigError

if TYPE_CHECKING:
    from lightning_diloco.hf.blueprint import Blueprint
    from lightning_diloco.planner.fixes import Fix
    from lightning_diloco.planner.plan import Forecast, Scenario

_EXAMPLE = """examples:
  diloco plan recipes/tiny/gpt.yaml --learners 2 --link 1Gbit --step 200ms
  diloco plan gemma/12b-8gpu --learners 8 --link 5Gbit --rtt 40ms --mtbf 6h --json"""
_RUN_OPTIONS = ("sync_every", "num_fragments", "overlap", "wire")
_COUNTS = {
    "num_learners": "--learners",
    "devices": "--devices",
    "max_steps": "--max-steps",
    "syncer_cores": "--syncer-cores",
}
_MARK = "# plan:"


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "forecast memory, links, time, disk and goodput of a recipe, and whether it fits"
    parser = add_verb(verbs, "plan", about, _EXAMPLE)
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML recipe, see `diloco ls`")
    parser.add_argument("--json", action="store_true", help="print JSON")
    simulate = "simulate the failures of --mtbf with `diloco simulate`, instead of a formula; may take minutes"
    parser.add_argument("--simulate", action="store_true", help=simulate)
    _add_machines(parser)
    options = parser.add_argument_group("options of the run, which override the recipe's")
    options.add_argument("--max-steps", type=int, metavar="N", help="inner steps of each learner")
    for name in _RUN_OPTIONS:
        kind = str if name == "wire" else int
        options.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X")
    parser.set_defaults(call=call)


def _add_machines(parser: argparse.ArgumentParser) -> None:
    machines = parser.add_argument_group(
        "machines and links", f"default: the recipe's `{_MARK}` line, else the value in parentheses"
    )
    add = machines.add_argument
    add("--learners", dest="num_learners", type=int, metavar="M", help="number of learners (2)")
    add("--devices", type=int, metavar="N", help="devices per learner (the recipe's, else 1)")
    link = "link of each learner in each direction, such as 5Gbit (1Gbit)"
    add("--link", dest="link_bps", type=bits, metavar="RATE", help=link)
    add("--syncer-link", dest="syncer_link_bps", type=bits, metavar="RATE", help="link of the syncer (M times --link)")
    add("--rtt", dest="rtt_s", type=seconds, metavar="TIME", help="round-trip time between learner and syncer (40ms)")
    add("--step", dest="step_s", type=seconds, metavar="TIME", help="time of a usual inner step (1s)")
    add("--pauses", type=share, metavar="SHARE", help="share of time in validation and slow steps, such as 5%% (none)")
    mtbf = "mean time between failures of a learner, such as 6h (none)"
    add("--mtbf", dest="mtbf_s", type=seconds, metavar="TIME", help=mtbf)
    restart = "time from a failure to the next step (2min)"
    add("--restart", dest="restart_s", type=seconds, metavar="TIME", help=restart)
    disk = "bytes per second that the syncer's disk can write (1GB)"
    add("--disk-rate", dest="disk_bytes_per_s", type=nbytes, metavar="SIZE", help=disk)
    standby = "link between the syncer, or a shard, and its standby (no standby)"
    add("--standby-link", dest="standby_link_bps", type=bits, metavar="RATE", help=standby)
    shards = "machines like the syncer's that share the fragments, with it (1)"
    add("--shards", dest="num_shards", type=int, metavar="S", help=shards)
    add("--syncer-cores", type=int, metavar="N", help="cores of the syncer (2)")
    memory = "bytes per second that the syncer's memory moves, see tests/bench/syncer_round.py (20GB)"
    add("--syncer-memory-rate", dest="memory_bytes_per_s", type=nbytes, metavar="SIZE", help=memory)
    for what in ("device", "host", "syncer"):
        help_ = "such as 80GiB (not checked)"
        add(f"--{what}-memory", dest=f"{what}_capacity", type=nbytes, metavar="SIZE", help=help_)
    add("--syncer-disk", dest="disk_capacity", type=nbytes, metavar="SIZE", help="such as 2TB (not checked)")


def call(arguments: argparse.Namespace) -> int:
    """Print the plan; return 0 if it fits, 1 if not."""
    path = recipes.resolve(arguments.recipe)
    if path.suffix == ".py":
        raise ConfigError(
            f"{path} is a script; only a YAML recipe can be planned, because a script must run to be read"
        )
    drawn, found = forecast_of(path, vars(arguments))
    if arguments.simulate:
        from lightning_diloco.cli.planned import simulated_goodput

        found = dataclasses.replace(found, goodput=simulated_goodput(found))
    from lightning_diloco.planner.fixes import cheapest_fix

    fix = cheapest_fix(found)
    notes = _notes(found, drawn, is_simulated=arguments.simulate)
    if arguments.json:
        print(json.dumps({**_figures(found, fix, drawn), "notes": notes}, indent=2))
    else:
        from rich.console import Console

        from lightning_diloco.cli.views.plan import plan_view

        Console().print(plan_view(path, found, fix, notes, _warnings(found, drawn)))
    return 0 if found.is_feasible else 1


def forecast_of(path: Path, given: Mapping[str, Any]) -> tuple[Blueprint, Forecast]:
    """Return the blueprint of a YAML recipe, and its forecast.

    Args:
        path: the recipe.
        given: as for `scenario_of`; values that are None or missing come from the recipe.
    """
    machines = _machines(path, given)
    with kept():
        from lightning_diloco.hf.blueprint import blueprint
        from lightning_diloco.hf.recipe import parse
        from lightning_diloco.planner.plan import forecast
    drawn = blueprint(parse(path))
    return drawn, forecast(scenario_of(drawn, machines))


def _machines(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by name: the given ones that are not None, else those of the recipe."""
    parser = argparse.ArgumentParser(prog=f"{path}, `{_MARK}`", allow_abbrev=False)
    _add_machines(parser)
    lines = path.read_text(encoding="utf-8").splitlines()
    words = [word for line in lines if line.startswith(_MARK) for word in shlex.split(line.removeprefix(_MARK))]
    of_recipe = vars(parser.parse_args(words))
    return {**of_recipe, **_only(given, given)}


def scenario_of(drawn: Blueprint, given: Mapping[str, Any]) -> Scenario:
    """Return the scenario of a recipe.

    Args:
        drawn: the recipe.
        given: values of `Machines`, `Scenario` and `RunConfig` by name, and `devices`; the others are defaults.
    """
    from lightning_diloco.planner.bandwidth import Machines
    from lightning_diloco.planner.memory import Training
    from lightning_diloco.planner.plan import Scenario

    for name, option in _COUNTS.items():
        if (number := given.get(name)) is not None and number < 1:
            raise ConfigError(f"{option} {number}: must be at least 1")
    devices = given.get("devices") or drawn.devices or 1
    shared = _names(Training) & _names(type(drawn)) - {"devices", "batch_size"}
    return Scenario(
        shapes=drawn.shapes,
        mean_names=drawn.mean_names,
        config=RunConfig(**{**drawn.run_options, **_only(_RUN_OPTIONS, given)}).validate(),
        training=Training(
            **{name: getattr(drawn, name) for name in shared},
            num_trainable=drawn.num_trainable,
            devices=devices,
            batch_size=_batch_per_device(drawn, devices),
        ),
        fleet=Machines(**_only(_names(Machines), given)),
        on_cpu=drawn.accelerator == "cpu",
        **{"max_steps": drawn.max_steps, **_only(_names(Scenario), given)},
    )


def _names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _only(names: Iterable[str], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in names if given.get(name) is not None}


def _batch_per_device(drawn: Blueprint, devices: int) -> int | None:
    """Return the batch size per device; on XLA, one process splits its batch over all devices."""
    if drawn.batch_size is None or drawn.accelerator not in ("tpu", "xla"):
        return drawn.batch_size
    return max(1, drawn.batch_size // devices)


def _figures(found: Forecast, fix: Fix | None, drawn: Blueprint) -> dict[str, Any]:
    """Return the values for `--json`: sizes in bytes, times in seconds, rates in bits per second."""
    from lightning_diloco.planner import bandwidth

    scenario, sizes, exchange = found.scenario, found.sizes, found.exchange
    config, fleet = scenario.config, scenario.fleet
    return {
        "parameters": drawn.num_parameters,
        "trainable_parameters": scenario.training.num_trainable,
        "tokens_per_step": scenario.training.tokens_per_step,
        "learners": fleet.num_learners,
        "devices_per_learner": scenario.training.devices,
        "num_fragments": sizes.count,
        "sync_every": config.sync_every,
        "overlap": config.overlap,
        "fragment_bytes_up": sizes.nbytes,
        "fragment_bytes_down": sizes.nbytes,
        **dataclasses.asdict(exchange),
        "learner_up_bps": bandwidth.learner_bps(sizes, config, fleet),
        "learner_down_bps": bandwidth.learner_bps(sizes, config, fleet),
        "syncer_bps": fleet.num_learners * bandwidth.learner_bps(sizes, config, fleet),
        "data_parallel_bps": bandwidth.data_parallel_bps(scenario.training, fleet),
        "device_bytes": sum(found.device.values()),
        "host_bytes": sum(found.host.values()),
        "syncer_bytes": sum(found.syncer.values()),
        "disk_bytes": sum(found.disk.values()),
        "log_bytes_per_s": bandwidth.log_bytes_per_s(sizes, config, fleet),
        "memory": {"device": found.device, "host": found.host, "syncer": found.syncer, "disk": found.disk},
        "totals": None if found.totals is None else dataclasses.asdict(found.totals),
        "goodput": found.goodput,
        "data_parallel_goodput": found.data_parallel_goodput,
        "loads": {resource.name: resource.load for resource in found.resources},
        "tightest": found.tightest.name,
        "fix": None if fix is None else dataclasses.asdict(fix),
        "warnings": _warnings(found, drawn),
        "feasible": found.is_feasible,
    }


def _notes(found: Forecast, drawn: Blueprint, *, is_simulated: bool) -> list[str]:
    """Return the assumptions of the forecast."""
    from lightning_diloco.planner.bandwidth import LINK_SHARE

    scenario = found.scenario
    devices = scenario.training.devices
    notes = [
        f"a stream gets {LINK_SHARE:.0%} of its link; the syncer's disk writes "
        f"{scenario.fleet.disk_bytes_per_s / 1e9:.1f} GB/s; it has {scenario.fleet.syncer_cores} core(s), numba, and "
        f"memory that moves {scenario.fleet.memory_bytes_per_s / 1e9:.0f} GB/s"
        + (
            "" if scenario.fleet.num_shards == 1 else f"; {scenario.fleet.num_shards} such machines share the fragments"
        ),
        f"parameters, gradients, two moments per parameter and anchors are spread evenly over {devices} device(s); "
        "allocator, kernels and data loading are not counted",
    ]
    if "activations" not in found.device:
        notes.append("activations are not counted: the batch or the decoder's sizes are not known")
    else:
        notes.append("activations: an estimate for fused attention without recomputation")
    if scenario.mtbf_s is None:
        notes.append("no failures; give --mtbf")
    else:
        notes.append(
            f"a learner fails every {scenario.mtbf_s / 3600:.3g} h, at a random time, makes its next step after "
            f"{scenario.restart_s:.0f} s and the adoption, and loses half a period of steps and what was in flight: "
            "goodput = exp(-(down + lost) / mtbf) * (1 - stall) * (1 - pauses)"
            + (", whose first factor was simulated" if is_simulated else "; --simulate runs the protocol instead")
        )
    if scenario.pauses:
        notes.append(f"{scenario.pauses:.1%} of the time goes into validation and into steps longer than usual")
    else:
        notes.append("all steps take the same time, without pauses between them; give --pauses")
    if drawn.devices is None:
        notes.append(f'trainer.devices is "auto": taken as {devices}; give --devices')
    return notes


def _warnings(found: Forecast, drawn: Blueprint) -> list[str]:
    """Return problems other than capacity, such as learners that this version's strategy does not start."""
    from lightning_diloco.hf.blueprint import strategy_problem

    problem = strategy_problem(drawn.accelerator, found.scenario.training.devices, drawn.spreads)
    return [f"this version does not start such a learner: {problem}"] if problem else []
