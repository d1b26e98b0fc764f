"""Options of `diloco simulate` that describe a fleet: parsers, defaults, and which of them belong together.

1. An option is stored by its name with underscores. None means that it was not given and has no fixed default.
2. NEEDS lists options that mean something only together with others. EITHER lists pairs of which only one can be given.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_diloco.cli.text.quantities import bits, count, positive, seconds, share, whole
from lightning_diloco.config import RunConfig
from lightning_diloco.errors import ConfigError

_RUN = RunConfig()
BASELINES = {"dp": "data parallel", "dp-elastic": "elastic data parallel"}


class Option(NamedTuple):
    """An option: the parser of a value, the default, the value's name in the help, and the help."""

    parse: Callable[[str], Any]
    default: Any
    metavar: str
    help: str


def _grace(text: str) -> float | str:
    return text if text == "adaptive" else 0.0 if re.fullmatch(r"0(\.0*)?\s*[a-z]*", text) else seconds(text)


# Options that take several values; each combination is simulated.
VARIED = {
    "learners": Option(positive, 8, "X", "number of learners (8)"),
    "chips": Option(count, 1.2e6, "X", "chips of all learners together, such as 1.2M (1.2M)"),
    "quorum": Option(positive, _RUN.quorum, "X", f"K, contributions that a round needs ({_RUN.quorum})"),
    "grace": Option(_grace, _RUN.grace, "X", f"time that a round waits for more, or adaptive ({_RUN.grace})"),
    "sync_every": Option(
        positive, _RUN.sync_every, "X", f"H, steps between exchanges of a fragment ({_RUN.sync_every})"
    ),
    "overlap": Option(positive, None, "X", f"tau, steps in which an update shall arrive ({_RUN.overlap})"),
    "link": Option(bits, 5e9, "X", "link of each learner in each direction (5Gbit)"),
    "mtbi": Option(seconds, seconds("1y"), "X", "mean time between interruptions of a chip, such as 1y (1y)"),
}
# Options of the chips that take a time; the defaults are those of `Chips`.
TIMES = {
    "rescale": "time that an elastic learner needs to go on with other slices (16s)",
    "hold": "longest time that a recovered slice waits before its learner uses it (45s)",
    "return": "median time until a failed slice is back (20min)",
    "restart": "time from a failure to the next step of training that is not elastic (76s)",
}
_SINGLE = {
    "spread": Option(share, 0.0, "SHARE", "maximum by which a learner's steps are longer, such as 20%% (0)"),
    "jitter": Option(share, 0.0, "SHARE", "variation of the steps of one learner (0)"),
    "parameters": Option(count, 5e9, "N", "parameters of the model, which are transferred (5B)"),
    "rtt": Option(seconds, 0.04, "TIME", "round-trip time between learner and syncer (40ms)"),
    "slice": Option(count, None, "N", "chips that are lost together (64, or all of a learner that has fewer)"),
    **{name: Option(seconds, None, "TIME", what) for name, what in TIMES.items()},
    "mtbf": Option(seconds, None, "TIME", "mean time between deaths of a learner's process (none dies)"),
    "rejoin": Option(seconds, 120.0, "TIME", "time from such a death to the next step (2min)"),
    "outage_every": Option(seconds, None, "TIME", "mean time between outages of a learner's link (none)"),
    "outage": Option(seconds, 60.0, "TIME", "duration of such an outage (1min)"),
    "syncer_mtbf": Option(seconds, None, "TIME", "mean time between failures of the syncer, and of each shard (none)"),
    "syncer_back": Option(seconds, 60.0, "TIME", "time until it, or its standby, serves again (1min)"),
    "shards": Option(positive, 1, "S", "machines that share the fragments, with --syncer-mtbf (1)"),
    "standby_link": Option(bits, None, "RATE", "link to a standby, which copies each commit (no standby)"),
    "extra": Option(positive, None, "N", "learners that join in the middle of the run, and leave again (none)"),
    "extra_for": Option(seconds, None, "TIME", "how long they stay; needed with --extra"),
    "site_link": Option(
        bits,
        None,
        "RATE",
        "link between the sites of data parallel training, which has several with --extra (infinitely fast)",
    ),
    "duration": Option(
        seconds,
        None,
        "TIME",
        "simulated time (60,000 steps of all learners together, or 1M of --baseline)",
    ),
    "steps": Option(count, None, "N", "the same as steps of each learner, the fastest one if they differ"),
    "seed": Option(whole, 1, "N", "seed of all randomness (1)"),
}
DEFAULTS: dict[str, Any] = {
    **{name: option.default for name, option in (VARIED | _SINGLE).items()},
    "step": [1.0],
    "failures_per": "chip",
    "baseline": None,
}
NEEDS = {
    "restart": ("baseline",),
    "rejoin": ("mtbf",),
    "outage": ("outage_every",),
    "syncer_back": ("syncer_mtbf",),
    "shards": ("syncer_mtbf",),
    "extra": ("extra_for",),
    "extra_for": ("extra",),
    "site_link": ("extra", "baseline"),
    "for": ("explore",),
    "seeds": ("explore",),
    "keep": ("explore",),
}
EITHER = (("steps", "duration"), ("keep", "seeds"), ("keep", "for"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options of a fleet."""
    add = parser.add_argument
    for name, option in VARIED.items():
        add(flag(name), nargs="+", type=option.parse, metavar=option.metavar, help=option.help)
    add(
        "--step",
        nargs="+",
        type=seconds,
        metavar="TIME",
        help="time of an inner step; of several, each learner has one, in turn (1s)",
    )
    add("--failures-per", choices=("chip", "slice"), help="what fails once per --mtbi (chip)")
    for name, option in _SINGLE.items():
        add(flag(name), type=option.parse, metavar=option.metavar, help=option.help)
    add("--baseline", nargs="+", choices=list(BASELINES), help="data parallel training, too")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw a PNG or SVG: over chips, or over the option with most numbers apart from --learners, or over time",
    )


def dashed(name: str) -> str:
    """Return the name of an option as it is shown."""
    return name.replace("_", "-")


def flag(name: str) -> str:
    """Return the option as on a command line."""
    return "--" + dashed(name)


def flags(names: Iterable[str]) -> str:
    """Return several options as on a command line."""
    return ", ".join(sorted(map(flag, names)))


def check_together(given: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if an option lacks another one, or excludes it."""
    problems = [
        f"{flag(name)} needs {' and '.join(map(flag, missing))}; add what is missing, or leave out {flag(name)}"
        for name, needed in NEEDS.items()
        if name in given and (missing := [each for each in needed if each not in given])
    ]
    problems += [
        f"{flag(one)} and {flag(other)} exclude each other; give one of them"
        for one, other in EITHER
        if one in given and other in given
    ]
    if problems:
        raise ConfigError(problems)


def merged(of_file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a file and of the command line, which takes precedence."""
    replaced = {each for pair in EITHER if not given.keys().isdisjoint(pair) for each in pair}
    return {**{name: value for name, value in of_file.items() if name not in replaced}, **given}


def as_file(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in the form of a scenario file, without those that mean nothing here."""
    given = {name: value for name, value in options.items() if value is not None}
    rates = {name for name, option in (VARIED | _SINGLE).items() if option.parse is bits}
    return {
        name: f"{value:.15g}bit" if name in rates else value
        for name, value in given.items()
        if all(each in given for each in NEEDS.get(name, ()))
    }
