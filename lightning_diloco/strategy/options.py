"""Turns keyword arguments into validated options.

None means unset. An unset run option is adopted from the run that is joined; an explicit one must agree with the run.
YAML tools pass every default explicitly, so only None can mark an option as unset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.errors import ConfigError, did_you_mean

RUN_NAMES = frozenset(field.name for field in dataclasses.fields(RunConfig))
_LEARNER_NAMES = frozenset(field.name for field in dataclasses.fields(LearnerConfig))


def resolve(
    options: Mapping[str, Any], known: Collection[str], inner_problems: Sequence[str] = ()
) -> tuple[dict[str, Any], LearnerConfig]:
    """Check all options together.

    Args:
        options: options by name; None is unset.
        known: names that are allowed.
        inner_problems: problems of the inner strategy.

    Returns:
        The explicit run options, and the learner's own options.

    Raises:
        ConfigError: there are problems; it names all of them, one sentence each.
    """
    explicit = {name: value for name, value in options.items() if value is not None and name in known}
    run = {name: explicit[name] for name in explicit if name in RUN_NAMES}
    learner = LearnerConfig(**{name: explicit[name] for name in explicit if name in _LEARNER_NAMES})
    problems = [_unknown(name, known) for name in options if name not in known] + list(inner_problems)
    if (count_fn := explicit.get("token_count_fn")) is not None and not callable(count_fn):
        problems.append(f"token_count_fn={count_fn!r}: must be a function from a batch to its number of tokens")
    problems += RunConfig.with_defaults(run).problems() + learner.problems()
    if problems:
        raise ConfigError(problems)
    return run, learner


def _unknown(name: str, known: Collection[str]) -> str:
    advice = did_you_mean(name, known) or f"known: {', '.join(sorted(known))}"
    return f"unknown option {name!r}: {advice}"
