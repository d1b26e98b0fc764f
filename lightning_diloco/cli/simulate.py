"""`diloco simulate`: forecasts goodput on chips that fail, or searches for errors in the protocol.

The forecast and the search run the state machines of real runs.

1. If options have several values, there is a row for each combination of values. Each number of chips has a column.
2. A YAML scenario holds options by name, such as `learners: [2, 4]`. The command line takes precedence.
3. The same options and seed give the same result.
4. With --explore, random histories are played until one breaks an invariant; see `simulate/explore.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_diloco.cli.text.quantities import bits, count, seconds, share
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.config import RunConfig
from lightning_diloco.errors import ConfigError

if TYPE_CHECKING:
    from lightning_diloco.cli.views.simulate import Row
    from lightning_diloco.simulate.goodput import Scenario

_EXAMPLE = """examples:
  diloco simulate --learners 8 --chips 1.2M
  diloco simulate --learners 2 4 8 16 --chips 150k 600k 2.4M --baseline dp dp-elastic --plot goodput.png
  diloco simulate --learners 8 --step 1s 1.18s --quorum 1 8 --mtbi 1000y
  diloco simulate --explore --for 2min"""
_RUN = RunConfig()
_BASELINES = {"dp": False, "dp-elastic": True}


def _grace(text: str) -> float | str:
    return text if text == "adaptive" else 0.0 if text == "0" else seconds(text)


# Options that take several values; each combination is simulated. An entry has the parser of a value, the default, and
# the help.
_VARIED: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "learners": (int, 8, "number of learners (8)"),
    "chips": (count, 1.2e6, "chips of all learners together, such as 1.2M (1.2M)"),
    "quorum": (int, _RUN.quorum, f"K, contributions that a round needs ({_RUN.quorum})"),
    "grace": (_grace, _RUN.grace, f"time that a round waits for more, or adaptive ({_RUN.grace})"),
    "sync-every": (int, _RUN.sync_every, f"H, steps between exchanges of a fragment ({_RUN.sync_every})"),
    "overlap": (int, None, f"tau, steps in which an update shall arrive ({_RUN.overlap})"),
    "link": (bits, 5e9, "link of each learner in each direction (5Gbit)"),
    "mtbi": (seconds, seconds("1y"), "mean time between interruptions of a chip, such as 1y (1y)"),
}
_OF_THE_RUN = ("quorum", "grace", "sync-every", "overlap")
_GRADIENT_BITS = 16  # bfloat16
_SEARCH = {"for_s", "seeds", "keep"}  # options of --explore alone
_TIMES = {
    "rescale": "time that an elastic learner needs to go on with other slices",
    "hold": "longest time that a recovered slice waits before its learner uses it",
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
    add(
        "--step",
        nargs="+",
        type=seconds,
        metavar="TIME",
        help="time of an inner step; of several, each learner has one, in turn (1s)",
    )
    add("--spread", type=share, metavar="SHARE", help="maximum by which a learner's steps are longer, such as 20%% (0)")
    add("--jitter", type=share, metavar="SHARE", help="variation of the steps of one learner (0)")
    add("--parameters", type=count, metavar="N", help="parameters of the model, which are transferred (5B)")
    add("--rtt", type=seconds, metavar="TIME", help="round-trip time between learner and syncer (40ms)")
    add("--slice", type=count, metavar="N", help="chips that are lost together (64)")
    add("--failures-per", choices=("chip", "slice"), help="what fails once per --mtbi (chip)")
    for name, what in _TIMES.items():
        add(f"--{name}", type=seconds, metavar="TIME", help=what)
    add("--mtbf", type=seconds, metavar="TIME", help="mean time between deaths of a learner's process (none dies)")
    add("--rejoin", type=seconds, metavar="TIME", help="time from such a death to the next step (2min)")
    add("--outage-every", type=seconds, metavar="TIME", help="mean time between outages of a learner's link (none)")
    add("--outage", type=seconds, metavar="TIME", help="duration of such an outage (1min)")
    add(
        "--syncer-mtbf",
        type=seconds,
        metavar="TIME",
        help="mean time between failures of the syncer, and of each shard (none)",
    )
    add("--syncer-back", type=seconds, metavar="TIME", help="time until it, or its standby, serves again (1min)")
    add("--shards", type=int, metavar="S", help="machines that share the fragments (1)")
    add("--standby-link", type=bits, metavar="RATE", help="link to a standby, which copies each commit (no standby)")
    add("--extra", type=int, metavar="N", help="learners that join in the middle of the run, and leave again (none)")
    add("--extra-for", type=seconds, metavar="TIME", help="how long they stay; needed with --extra")
    add(
        "--site-link",
        type=bits,
        metavar="RATE",
        help="link between the sites of data parallel training, which has several with --extra (infinitely fast)",
    )
    add("--duration", type=seconds, metavar="TIME", help="simulated time (60,000 steps of all learners together)")
    add("--steps", type=count, metavar="N", help="the same as steps of each learner, the fastest one if they differ")
    add("--seed", type=int, metavar="N", help="seed of all randomness (1)")
    add("--baseline", nargs="+", choices=list(_BASELINES), default=None, help="data parallel training, too")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw a PNG or SVG: over chips, over the option with most values, or over time",
    )
    add("--json", action="store_true", help="print JSON")
    search = parser.add_argument_group("search for histories that break an invariant of the protocol")
    search.add_argument("--explore", action="store_true", help="search, from --seed on, instead of a forecast")
    search.add_argument("--for", dest="for_s", type=seconds, metavar="TIME", help="how long to search (until it fails)")
    search.add_argument("--seeds", type=int, metavar="N", help="how many histories to play (no limit)")
    search.add_argument("--keep", type=_numbers, metavar="0,3,7", help="play only these steps of the history of --seed")
    parser.set_defaults(call=call, parser=parser)


def call(arguments: argparse.Namespace) -> int:
    """Print the result; return 1 if an invariant was broken."""
    if arguments.explore:
        return _explore(arguments)
    from lightning_diloco.cli.views import simulate as view

    given = _given(arguments)
    if stray := given.keys() & _SEARCH:
        raise ConfigError(
            f"{_names(stray)}: needs --explore, which searches for broken invariants and makes no forecast"
        )
    if arguments.scenario is not None:
        given = {**_of_file(arguments.scenario, arguments.parser), **given}
    draw = view.painter(given["plot"]) if "plot" in given else lambda rows: None
    rows = list(_simulated(given))
    draw(rows)
    if arguments.json:
        print(json.dumps({"rows": [row.figures() for row in rows], "assumptions": view.assumptions(rows)}, indent=2))
    else:
        view.show(rows)
    return 0


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the command line by name."""
    ours = {action.dest for action in arguments.parser._actions if action.option_strings} - {"help", "json"}
    return {name: value for name, value in vars(arguments).items() if name in ours and value not in (None, False)}


def _names(options: Iterable[str]) -> str:
    return ", ".join(sorted("--" + name.removesuffix("_s").replace("_", "-") for name in options))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",") if number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers of steps, such as 0,3,7") from None


def _explore(arguments: argparse.Namespace) -> int:
    from lightning_diloco.simulate.explore import Found, History, Violation, explore

    if stray := _given(arguments).keys() - _SEARCH - {"seed", "explore"}:
        raise ConfigError(
            f"{_names(stray)}: not with --explore; histories have settings of their own, which follow from --seed"
        )
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
    known = {action.dest for action in parser._actions if action.option_strings} - _SEARCH - {"explore", "help", "json"}
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


def _simulated(given: Mapping[str, Any]) -> Iterator[Row]:
    from lightning_diloco.cli.views.simulate import Row
    from lightning_diloco.simulate.goodput import data_parallel, simulate

    values = {name: given.get(name.replace("-", "_"), [default]) for name, (_, default, _) in _VARIED.items()}
    several = {name for name, choices in values.items() if len(choices) > 1} - {"learners", "chips"}
    for baseline in given.get("baseline", ()):
        name = "elastic data parallel" if _BASELINES[baseline] else "data parallel"
        for chips, mtbi_s in itertools.product(values["chips"], values["mtbi"]):
            options = {name: choices[0] for name, choices in values.items()}
            scenario = _scenario(given, {**options, "chips": chips, "mtbi": mtbi_s})
            varied = {"mtbi": mtbi_s} if "mtbi" in several else {}
            yield Row(name, 1, chips, varied, scenario, data_parallel(scenario, is_elastic=_BASELINES[baseline]))
    for combination in itertools.product(*values.values()):
        options = dict(zip(values, combination, strict=True))
        scenario = _scenario(given, options)
        varied = {name: options[name] for name in values if name in several}
        num_learners = options["learners"]
        name = f"{num_learners} learner" + "s" * (num_learners != 1)
        yield Row(name, num_learners, options["chips"], varied, scenario, simulate(scenario))


def _scenario(given: Mapping[str, Any], options: Mapping[str, Any]) -> Scenario:
    from lightning_diloco.cli.planned import durations
    from lightning_diloco.core.quantize import wire_nbytes
    from lightning_diloco.planner.bandwidth import Exchange, Machines
    from lightning_diloco.planner.memory import FragmentSizes
    from lightning_diloco.simulate.chips import Chips
    from lightning_diloco.simulate.goodput import Scenario

    num_learners, steps_s, rtt_s = options["learners"], tuple(given.get("step", [1.0])), given.get("rtt", 0.04)
    of_the_run = {name.replace("-", "_"): options[name] for name in _OF_THE_RUN if options[name] is not None}
    config = RunConfig.with_defaults(of_the_run).validate()
    if "steps" in given and "duration" in given:
        raise ConfigError("--steps and --duration both set the simulated time; give one of them")
    if num_learners < 1:
        raise ConfigError(f"--learners {num_learners}: at least one learner trains")
    if config.quorum > num_learners:
        raise ConfigError(
            f"--quorum {config.quorum}: must be at most --learners, {num_learners}; otherwise no round would end"
        )
    times = {f"{name}_s": given[name] for name in _TIMES if name in given}
    chips = Chips(
        count=options["chips"] / num_learners,
        slice_chips=given.get("slice", min(64.0, options["chips"] / num_learners)),
        mtbi_s=options["mtbi"],
        failures_per=given.get("failures_per", "chip"),
        **times,
    )
    parameters = given.get("parameters", 5e9)
    numel = int(parameters / config.fragments_wanted / config.block_size + 1) * config.block_size
    nbytes = wire_nbytes(numel, config.wire, config.block_size)
    p = config.fragments_wanted
    sizes = FragmentSizes(numel, numel * p, nbytes, nbytes * p, p)
    # The syncer's machine is never the bottleneck here; `diloco plan` checks a real one.
    fleet = Machines(num_learners=num_learners, link_bps=options["link"], rtt_s=rtt_s, step_s=min(steps_s),
                     syncer_cores=64, memory_bytes_per_s=400e9, num_shards=max(1, given.get("shards", 1)),
                     standby_link_bps=given.get("standby_link"))  # fmt: skip
    exchange = Exchange.of(sizes, config, fleet)
    return Scenario(
        num_learners=num_learners,
        chips=chips,
        step_s=steps_s,
        spread=given.get("spread", 0.0),
        jitter=given.get("jitter", 0.0),
        mtbf_s=given.get("mtbf"),
        rejoin_s=given.get("rejoin", 120.0),
        outage_mtbf_s=given.get("outage_every"),
        outage_s=given.get("outage", 60.0),
        syncer_mtbf_s=given.get("syncer_mtbf"),
        syncer_back_s=given.get("syncer_back", 60.0),
        num_shards=given.get("shards", 1),
        num_extra=given.get("extra", 0),
        extra_s=given.get("extra_for", 0.0),
        site_s=_GRADIENT_BITS * parameters / given["site_link"] if "site_link" in given else 0.0,
        duration_s=given["steps"] * min(steps_s) if "steps" in given else given.get("duration"),
        config=config,
        seed=given.get("seed", 1),
        **durations(exchange, rtt_s),
    )
