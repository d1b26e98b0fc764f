"""`diloco simulate`: forecasts goodput on chips that fail, or searches for holes, by the state machines of real runs.

1. An option with several values gives a row for each combination of them. A column shows each number of chips.
2. A YAML scenario holds options by name, such as `learners: [2, 4]`. The command line takes precedence.
3. The same options and seed give the same result.
4. With --explore, random histories are played until one breaks an invariant; see `simulate/explore.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_diloco.cli.text.quantities import bits, count, seconds, share
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.config import RunConfig
from lightning_diloco.errors import ConfigError

if TYPE_CHECKING:
    from lightning_diloco.simulate.goodput import Outcome, Scenario

_EXAMPLE = """examples:
  diloco simulate --learners 8 --chips 1.2M
  diloco simulate --learners 2 4 8 16 --chips 150k 600k 2.4M --baseline dp dp-elastic --plot goodput.png
  diloco simulate --learners 8 --step 1s 1.18s --quorum 1 8 --mtbi 1000y
  diloco simulate --explore --for 2min"""
_RUN = RunConfig()
_BASELINES = {"dp": False, "dp-elastic": True}


def _grace(text: str) -> float | str:
    return text if text == "adaptive" else 0.0 if text == "0" else seconds(text)


# Options with several values, of which each combination is simulated: parser of a value, default, help.
_VARIED: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "learners": (int, 8, "number of learners (8)"),
    "chips": (count, 1.2e6, "chips of all learners together, such as 1.2M (1.2M)"),
    "quorum": (int, _RUN.quorum, f"K, contributions that a round needs ({_RUN.quorum})"),
    "grace": (_grace, _RUN.grace, f"time that a round waits for more, or adaptive ({_RUN.grace})"),
    "sync-every": (int, _RUN.sync_every, f"H, steps between exchanges of a fragment ({_RUN.sync_every})"),
    "link": (bits, 5e9, "link of each learner in each direction (5Gbit)"),
    "mtbi": (seconds, None, "mean time between interruptions of a chip, such as 1y (1y)"),
}
_TIMES = {
    "rescale": "time that an elastic learner needs to go on with other slices",
    "hold": "longest time that a slice which is back waits for the next failure",
    "return": "median time until a failed slice is back",
    "restart": "time from a failure to the next step of training that is not elastic",
}


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "forecast goodput, uptime and participation of a fleet whose chips fail"
    parser = add_verb(verbs, "simulate", about, _EXAMPLE)
    add = parser.add_argument
    add("scenario", nargs="?", type=Path, metavar="SCENARIO.yaml", help="options by name")
    for name, (parse, _, what) in _VARIED.items():
        add(f"--{name}", nargs="+", type=parse, metavar="X", help=what)
    add("--step", nargs="+", type=seconds, metavar="TIME", help="an inner step; of several, learners take turns (1s)")
    add("--spread", type=share, metavar="SHARE", help="by which learners' steps are longer, at most (0)")
    add("--jitter", type=share, metavar="SHARE", help="by which steps of one learner vary (0)")
    add("--parameters", type=count, metavar="N", help="parameters of the model, which are transferred (5B)")
    add("--rtt", type=seconds, metavar="TIME", help="round-trip time between learner and syncer (40ms)")
    add("--slice", type=count, metavar="N", help="chips that are lost together (64)")
    add("--failures-per", choices=("chip", "slice"), help="what fails once per --mtbi (chip)")
    for name, what in _TIMES.items():
        add(f"--{name}", type=seconds, metavar="TIME", help=what)
    add("--duration", type=seconds, metavar="TIME", help="simulated time (60,000 steps of all learners together)")
    add("--seed", type=int, metavar="N", help="seed of all randomness (1)")
    add("--baseline", nargs="+", choices=list(_BASELINES), default=None, help="data parallel training, too")
    add("--plot", type=Path, metavar="FILE", help="draw goodput over chips, or training over time, as PNG or SVG")
    add("--json", action="store_true", help="print JSON")
    search = parser.add_argument_group("search for histories that break an invariant of the protocol")
    search.add_argument("--explore", action="store_true", help="search, from --seed on, instead of a forecast")
    search.add_argument("--for", dest="for_s", type=seconds, metavar="TIME", help="how long to search (until it fails)")
    search.add_argument("--seeds", type=int, metavar="N", help="how many histories to play (no limit)")
    search.add_argument("--keep", type=_numbers, metavar="0,3,7", help="play only these steps of the history of --seed")
    parser.set_defaults(call=call, parser=parser)


def call(arguments: argparse.Namespace) -> int:
    """Print what was found; return 1 if an invariant was broken."""
    if arguments.explore:
        return _explore(arguments)
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if arguments.scenario is not None:
        given = {**_of_file(arguments.scenario, arguments.parser), **given}
    given["json"] = arguments.json or given["json"]
    rows = list(_simulated(given))
    if "plot" in given:
        _draw(rows, given["plot"])
    if given["json"]:
        print(json.dumps({"rows": [_figures(row) for row in rows], "assumptions": _assumptions(rows)}, indent=2))
    else:
        _print(rows)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",") if number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers of steps, such as 0,3,7") from None


def _explore(arguments: argparse.Namespace) -> int:
    from lightning_diloco.simulate.explore import Found, History, Violation, explore

    seed = 1 if arguments.seed is None else arguments.seed
    if arguments.keep is None:
        found = explore(seed, num_seeds=arguments.seeds, for_s=arguments.for_s)
    else:
        history = History(seed, kept=arguments.keep)
        text = history.play()
        found = Found(1, history.num_events, None if text is None else Violation(seed, arguments.keep, text))
    print(f"{found.seeds} histories from seed {seed} on, {found.events:,} events checked")
    violation = found.violation
    if violation is None:
        print("no invariant was broken")
        return 0
    steps = History(violation.seed).steps
    print(violation.text)
    print("steps that are needed:")
    for number in violation.kept:
        print(f"  {number}: {steps[number].kind} (learner {steps[number].who}, {steps[number].amount:.2f})")
    kept = ",".join(map(str, violation.kept))
    print(f"replay it: diloco simulate --explore --seed {violation.seed} --keep {kept or ','}")
    return 1


def _of_file(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the options of a scenario, checked as those of a command line."""
    import yaml

    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no scenario: {error}") from error
    known = {action.dest for action in parser._actions if action.option_strings} - {
        "help",
        "json",
        "explore",
        "for_s",
        "seeds",
        "keep",
    }
    if not isinstance(options, dict) or (unknown := set(options) - known):
        found = (
            f"unknown options {', '.join(sorted(map(str, unknown)))}" if isinstance(options, dict) else repr(options)
        )
        raise ConfigError(f"{path}: {found}; a scenario maps options to values; known: {', '.join(sorted(known))}")
    words = [f"{path}"]
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    parsed = vars(parser.parse_args(words))
    return {name: parsed[name] for name in options}


class Row:
    """One simulated combination of options, or a baseline.

    Args:
        name: what is simulated, such as "8 learners" or "data parallel".
        varied: options that have several values, by name, without the number of chips.
    """

    def __init__(self, name: str, chips: float, varied: Mapping[str, Any], scenario: Scenario, found: Outcome) -> None:
        self.name, self.chips, self.varied, self.scenario, self.found = name, chips, dict(varied), scenario, found

    @property
    def label(self) -> str:
        """Return the name with the options that vary."""
        return ", ".join([self.name, *(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                                       for name, value in self.varied.items())])  # fmt: skip


def _simulated(given: Mapping[str, Any]) -> Iterator[Row]:
    from lightning_diloco.simulate.chips import YEAR_S
    from lightning_diloco.simulate.goodput import data_parallel, simulate

    values = {name: given.get(name.replace("-", "_"), [default]) for name, (_, default, _) in _VARIED.items()}
    values["mtbi"] = given.get("mtbi", [YEAR_S])
    several = {name for name, choices in values.items() if len(choices) > 1} - {"learners", "chips"}
    for baseline in given.get("baseline", ()):
        name = "elastic data parallel" if _BASELINES[baseline] else "data parallel"
        for chips, mtbi_s in itertools.product(values["chips"], values["mtbi"]):
            options = {**{name: choices[0] for name, choices in values.items()}, "learners": 1}
            scenario = _scenario(given, {**options, "chips": chips, "mtbi": mtbi_s})
            varied = {"mtbi": mtbi_s} if "mtbi" in several else {}
            yield Row(name, chips, varied, scenario, data_parallel(scenario, is_elastic=_BASELINES[baseline]))
    for combination in itertools.product(*values.values()):
        options = dict(zip(values, combination, strict=True))
        scenario = _scenario(given, options)
        varied = {name: options[name] for name in values if name in several}
        name = f"{options['learners']} learner" + "s" * (options["learners"] != 1)
        yield Row(name, options["chips"], varied, scenario, simulate(scenario))


def _scenario(given: Mapping[str, Any], options: Mapping[str, Any]) -> Scenario:
    from lightning_diloco.core.quantize import wire_nbytes
    from lightning_diloco.planner.bandwidth import Exchange, Machines
    from lightning_diloco.planner.memory import FragmentSizes
    from lightning_diloco.simulate.chips import Chips
    from lightning_diloco.simulate.goodput import Scenario
    from lightning_diloco.simulate.settings import Network

    num_learners, steps_s, rtt_s = options["learners"], tuple(given.get("step", [1.0])), given.get("rtt", 0.04)
    config = RunConfig.with_defaults(
        {"quorum": options["quorum"], "grace": options["grace"], "sync_every": options["sync-every"]}
    ).validate()
    if num_learners < 1:
        raise ConfigError(f"--learners {num_learners}: at least one learner trains")
    times = {f"{name}_s": given[name] for name in _TIMES if name in given}
    chips = Chips(
        count=options["chips"] / num_learners,
        slice_chips=given.get("slice", min(64.0, options["chips"] / num_learners)),
        mtbi_s=options["mtbi"],
        failures_per=given.get("failures_per", "chip"),
        **times,
    )
    numel = int(given.get("parameters", 5e9) / config.fragments_wanted / config.block_size + 1) * config.block_size
    nbytes = wire_nbytes(numel, config.wire, config.block_size)
    p = config.fragments_wanted
    sizes = FragmentSizes(numel, numel * p, nbytes, nbytes * p, p)
    # The syncer keeps up: whether one machine does is what `diloco plan` says.
    fleet = Machines(num_learners=num_learners, link_bps=options["link"], rtt_s=rtt_s, step_s=min(steps_s),
                     syncer_cores=64, memory_bytes_per_s=400e9)  # fmt: skip
    exchange = Exchange.of(sizes, config, fleet)
    return Scenario(
        num_learners=num_learners,
        chips=chips,
        step_s=steps_s,
        spread=given.get("spread", 0.0),
        jitter=given.get("jitter", 0.0),
        duration_s=given.get("duration"),
        network=Network(latency_s=rtt_s / 2, upload_s=exchange.upload_s, download_s=exchange.download_s),
        merge_s=(exchange.merge_s + exchange.log_s) / 2,
        config=config,
        seed=given.get("seed", 1),
    )


def _figures(row: Row) -> dict[str, Any]:
    found = dataclasses.asdict(row.found)
    del found["training"]
    return {"run": row.name, "learners": row.scenario.num_learners, "chips": row.chips, **row.varied, **found}


def _assumptions(rows: Sequence[Row]) -> list[str]:
    """Return the assumptions of the forecast, in sentences."""
    last = rows[-1].scenario
    chips, network = last.chips, last.network
    steps = " or ".join(f"{step_s:g} s" for step_s in last.step_s)
    return [
        f"each {chips.failures_per} fails once in {chips.mtbi_s / 86400:,.0f} days on average, independently; a "
        f"failure takes {chips.slice_chips:g} chip(s) away, half of the times for less than {chips.return_s:g} s",
        f"an elastic learner stands still for {chips.rescale_s:g} s after a failure, and trains on with the slices "
        f"that are left; those that return wait for the next failure, at most {chips.hold_s:g} s",
        f"a job that is not elastic restarts {chips.restart_s:g} s after a failure, on spare chips",
        "the step that a failure interrupts is lost; no other work is",
        f"a step takes {steps}; an upload {network.upload_s:.2g} s, a merge {2 * last.merge_s:.2g} s, a download "
        f"{network.download_s:.2g} s; {last.config.fragments_wanted} fragments, H = {last.config.sync_every}, "
        f"overlap {last.config.overlap}; the syncer has as many cores as it needs, and does not fail",
        "the communication of data parallel training takes no time",
        "take part: contributors of a round, of the learners that were stepping when it opened; merged: contributions",
        f"{last.length_s:,.0f} s are simulated, and as much work for each baseline",
    ]


def _print(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table, columns = Table(title_justify="left", title_style="bold"), sorted({row.chips for row in rows})
    table.add_column("")
    if len(columns) > 1:
        table.title = "goodput"
        for chips in columns:
            table.add_column(_chips(chips), justify="right")
        for label in dict.fromkeys(row.label for row in rows):
            by_chips = {row.chips: row.found.goodput for row in rows if row.label == label}
            table.add_row(label, *(f"{by_chips[chips]:.1%}" for chips in columns))
    else:
        table.title = f"{_chips(columns[0])} chips"
        for column in ("goodput", "uptime", "pauses", "take part", "rounds", "merged"):
            table.add_column(column, justify="right")
        for row in rows:
            found = row.found
            some = () if found.participation is None else (
                f"{found.participation:.1%}", f"{found.rounds:,}", f"{found.merges:,}"
            )  # fmt: skip
            table.add_row(row.label, f"{found.goodput:.1%}", f"{found.uptime:.1%}", f"{found.pauses:,}", *some)
    console = Console()
    console.print(table)
    console.print(Text("assumed", style="bold"))
    for sentence in _assumptions(rows):
        console.print(Text(f"  {sentence}", style="dim"))


def _chips(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:g}{unit}"
    return f"{number:g}"


def _draw(rows: Sequence[Row], path: Path) -> None:
    try:
        from lightning_diloco.plots.forecast import draw_goodput, draw_training
    except ImportError as error:
        raise ConfigError(f"{error}: plots need matplotlib; pip install 'lightning-diloco[plot]'") from error
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot {path}: must end in .png or .svg")
    if len({row.chips for row in rows}) > 1:
        labels = dict.fromkeys(row.label for row in rows)
        draw_goodput(
            {of: sorted((row.chips, row.found.goodput) for row in rows if row.label == of) for of in labels}, path
        )
    else:
        shares = {
            row.label: [(at_s, num / max(1, row.found.training[0][1])) for at_s, num in row.found.training]
            for row in rows
        }
        draw_training(shares, path, until_s=min(row.scenario.length_s for row in rows))
