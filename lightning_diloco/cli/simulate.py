"""`diloco simulate`: forecasts goodput on chips that fail, or searches for errors in the protocol.

The forecast and the search run the state machines of real runs.

1. If options have several values, there is a row for each combination of values. Each number of chips has a column.
2. A YAML scenario holds options by name, such as `learners: [2, 4]`. The command line takes precedence.
3. The same options and seed give the same result.
4. With --explore, random histories are played until one breaks an invariant; see `simulate/explore.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_diloco.cli.scenarios.options import DEFAULTS, add_options, check_together, flags, merged
from lightning_diloco.cli.text.quantities import positive, seconds
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.errors import ConfigError

if TYPE_CHECKING:
    from lightning_diloco.simulate.explore import Found

_EXAMPLE = """examples:
  diloco simulate --learners 8 --chips 1.2M
  diloco simulate --learners 2 4 8 16 --chips 150k 600k 2.4M --baseline dp dp-elastic --plot goodput.png
  diloco simulate --learners 8 --step 1s 1.18s --quorum 1 8 --mtbi 1000y
  diloco simulate --explore --for 2min"""
_SEARCH = {"explore", "for", "seeds", "keep", "seed"}  # options of the search
_OPTIONS = DEFAULTS.keys() | _SEARCH | {"plot"}


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "forecast goodput, uptime and participation of a fleet whose chips fail"
    parser = add_verb(verbs, "simulate", about, _EXAMPLE)
    parser.add_argument("scenario", nargs="?", type=Path, metavar="SCENARIO.yaml", help="options by name")
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    search = parser.add_argument_group("search for histories that break an invariant of the protocol")
    add = search.add_argument
    add("--explore", action="store_true", help="search, from --seed on, instead of a forecast")
    add("--for", type=seconds, metavar="TIME", help="how long to search (until it fails)")
    add("--seeds", type=positive, metavar="N", help="how many histories to play (no limit)")
    add("--keep", type=_numbers, metavar="0,3,7", help="play only these steps of the history of --seed")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Print the result; return 1 if an invariant was broken."""
    given = _given(arguments)
    if arguments.explore:
        return _explore(arguments, given)
    from lightning_diloco.cli.scenarios.file import read
    from lightning_diloco.cli.scenarios.rows import rows_of
    from lightning_diloco.cli.views import simulate as view

    if arguments.scenario is not None:
        given = merged(read(arguments.scenario), given)
    try:
        rows = rows_of(given)
    except ConfigError as error:
        if arguments.scenario is None:
            raise
        raise ConfigError([f"{arguments.scenario}: {problem}" for problem in error.problems]) from None
    draw = view.painter(given["plot"]) if "plot" in given else lambda rows: None
    draw(rows)
    if arguments.json:
        print(json.dumps({"rows": [row.figures() for row in rows], "assumptions": view.assumptions(rows)}, indent=2))
    else:
        view.show(rows)
    return 0


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the command line by name, without --json."""
    values = {name: value for name, value in vars(arguments).items() if name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def _numbers(text: str) -> tuple[int, ...]:
    words = [word for word in text.split(",") if word]
    numbers = [int(word) if word.isdecimal() else -1 for word in words]
    if -1 in numbers or numbers != sorted(set(numbers)):
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers of steps in ascending order, such as 0,3,7")
    return tuple(numbers)


def _explore(arguments: argparse.Namespace, given: dict[str, Any]) -> int:
    from lightning_diloco.simulate.explore import Found, History, Violation, explore

    if stray := given.keys() - _SEARCH:
        raise ConfigError(
            f"{flags(stray)}: not with --explore; histories have settings of their own, which follow from --seed; "
            "leave out these options"
        )
    if arguments.scenario is not None:
        raise ConfigError(f"{arguments.scenario}: no scenario with --explore; leave out the file, or --explore")
    check_together(given)
    seed = given.get("seed", 1)
    if arguments.keep is None:
        found = explore(seed, num_seeds=arguments.seeds, for_s=given.get("for"))
    else:
        history = History(seed, kept=arguments.keep)
        if arguments.keep and arguments.keep[-1] >= len(history.steps):
            raise ConfigError(
                f"--keep {arguments.keep[-1]}: the history of --seed {seed} has the steps 0 to "
                f"{len(history.steps) - 1}; keep some of these"
            )
        text = history.play()
        found = Found(1, history.num_events, None if text is None else Violation(seed, arguments.keep, text))
    steps = [] if found.violation is None else History(found.violation.seed).steps
    shown = _figures(seed, found, steps)
    if arguments.json:
        print(json.dumps(shown, indent=2))
    else:
        _show(shown)
    return 0 if found.violation is None else 1


def _figures(seed: int, found: Found, steps: list[Any]) -> dict[str, Any]:
    """Return what a search has found, for `--json`."""
    shown: dict[str, Any] = {"seed": seed, "histories": found.seeds, "events": found.events, "violation": None}
    if (violation := found.violation) is not None:
        kept = ",".join(map(str, violation.kept)) or ","
        needed = [{"number": k, "kind": steps[k].kind, "learner": steps[k].who, "amount": steps[k].amount}
                  for k in violation.kept]  # fmt: skip
        replay = f"diloco simulate --explore --seed {violation.seed} --keep {kept}"
        shown["violation"] = {"seed": violation.seed, "text": violation.text, "steps": needed, "replay": replay}
    return shown


def _show(found: dict[str, Any]) -> None:
    print(f"histories: {found['histories']}, from seed {found['seed']} on, {found['events']:,} events checked")
    violation = found["violation"]
    if violation is None:
        print("no invariant was broken")
        return
    print(violation["text"])
    print("steps that are needed:")
    for step in violation["steps"]:
        print(f"  {step['number']}: {step['kind']} (learner {step['learner']}, {step['amount']:.2f})")
    print(f"replay it: {violation['replay']}")
