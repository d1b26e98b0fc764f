"""Reads a scenario: a YAML file of options by name, checked as those of a command line.

Names may have dashes or underscores. All problems are reported at once, with the file's name.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_diloco.cli.scenarios.options import add_options, dashed, flag
from lightning_diloco.cli.text.spelling import hint
from lightning_diloco.errors import ConfigError


def read(path: Path) -> dict[str, Any]:
    """Return the options of a scenario.

    Raises:
        ConfigError: the file cannot be read, or an option is unknown, given twice, or has a bad value.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        root, options = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no scenario: {error}; write a YAML file such as `learners: [2, 4]`") from error
    if not isinstance(root, yaml.MappingNode):
        found = "is empty" if options is None else f"holds {options!r}"
        raise ConfigError(f"{path} {found}; a scenario maps options to values, such as `learners: [2, 4]`")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_options(parser)
    names = [key.value.replace("-", "_") for key, _ in root.value]
    problems = _bad_names(names, [action.dest for action in parser._actions])
    if not problems:
        parsed, problems = _parsed(parser, dict(zip(names, options.values(), strict=True)))
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return parsed


def _bad_names(names: Sequence[str], known: Sequence[str]) -> list[str]:
    shown = sorted(map(dashed, known))
    unknown = [f"{name}{hint(name, shown)}" for name in names if name not in known]
    problems = [f"unknown options: {', '.join(unknown)}; known: {', '.join(shown)}"] if unknown else []
    twice = [name for name, times in Counter(names).items() if times > 1]
    return problems + [f"{name} is given more than once; give all of its values in one list" for name in twice]


def _parsed(parser: argparse.ArgumentParser, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    parsed, problems = {}, []
    for name, value in options.items():
        if value is None:
            problems.append(f"{name} has no value; give one, or leave it out")
            continue
        words = [str(each) for each in (value if isinstance(value, list) else [value])]
        try:
            found, too_many = parser.parse_known_args([flag(name), *words])
        except argparse.ArgumentError as error:
            problems.append(f"{name}: {error.message}")
            continue
        if too_many or any(other is not None for each, other in vars(found).items() if each != name):
            problems.append(f"{name}: {value!r}: must be one value, and no option")
        parsed[name] = vars(found)[name]
    return parsed, problems
