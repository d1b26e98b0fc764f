"""Defaults that depend on other options."""

from __future__ import annotations

from typing import Literal

import pytest

from lightning_diloco.config import RunConfig
from lightning_diloco.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "overlap"),
    [({}, 2), ({"sync_every": 1}, 1), ({"num_fragments": 1}, 1), ({"sync_every": 5}, 2), ({"overlap": 3}, 3)],
)
def test_unset_overlap_fits_the_number_of_fragments(given: dict[str, int], overlap: int) -> None:
    assert RunConfig.from_dict(given).overlap == overlap


@pytest.mark.parametrize(
    ("given", "lr", "momentum"),
    [
        ({}, "auto", 0.6),
        ({"sync_every": 100}, "auto", 0.6),
        ({"sync_every": 12}, "auto", 0.3),
        ({"sync_every": 6}, "auto", 0.15),
        ({"sync_every": 6, "outer_momentum": 0.6}, "auto", 0.6),
        ({"sync_every": 6, "outer_lr": 0.5}, 0.5, 0.15),
    ],
)
def test_shorter_periods_have_less_outer_momentum(
    given: dict[str, float], lr: Literal["auto"] | float, momentum: float
) -> None:
    config = RunConfig.from_dict(given)
    assert (config.outer_lr, config.outer_momentum) == (lr, pytest.approx(momentum))
    assert RunConfig.from_dict(config.to_dict()) == config


def test_explicit_overlap_is_never_changed() -> None:
    with pytest.raises(ConfigError, match="overlap=2: must be at most the number of fragments, 1"):
        RunConfig.from_dict({"sync_every": 1, "overlap": 2})


@pytest.mark.parametrize("given", [{"sync_every": 0}, {"sync_every": "many"}, {"num_fragments": 1.5}])
def test_a_bad_option_is_named_without_further_problems(given: dict[str, object]) -> None:
    problems = RunConfig.with_defaults(given).problems()
    assert len(problems) == 1
    assert next(iter(given)) in problems[0]
