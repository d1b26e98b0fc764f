"""Options of a scenario that belong together, or exclude each other."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_diloco.cli.scenarios.options import DEFAULTS, EITHER, NEEDS, TIMES, check_together, merged
from lightning_diloco.cli.text.quantities import as_time
from lightning_diloco.errors import ConfigError
from lightning_diloco.simulate.chips import Chips


@pytest.mark.parametrize("name", NEEDS)
def test_an_option_without_its_partners_is_refused(name: str) -> None:
    needed = {"explore": True} | dict.fromkeys(NEEDS[name], 1)
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} needs --.*; add what is missing, or leave out"):
        check_together({name: 1})
    others = {each: 1 for partner in NEEDS[name] for each in NEEDS.get(partner, ())}
    check_together({name: 1, **needed, **others})


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        check_together({"rejoin": 1, "site_link": 1, "extra": 1, "steps": 1, "duration": 1})
    assert refused.value.problems == (
        "--rejoin needs --mtbf; add what is missing, or leave out --rejoin",
        "--extra needs --extra-for; add what is missing, or leave out --extra",
        "--site-link needs --baseline; add what is missing, or leave out --site-link",
        "--steps and --duration exclude each other; give one of them",
    )


def test_the_partners_are_options() -> None:
    known = {*DEFAULTS, "explore", "for", "seeds", "keep"}
    assert known >= {
        *NEEDS,
        *(each for needed in NEEDS.values() for each in needed),
        *(x for two in EITHER for x in two),
    }


@pytest.mark.parametrize(
    ("of_file", "given", "found"),
    [
        ({"steps": 100}, {"duration": 5.0}, {"duration": 5.0}),
        ({"duration": 5.0}, {"steps": 100}, {"steps": 100}),
        ({"duration": 5.0, "seed": 1}, {"seed": 0}, {"duration": 5.0, "seed": 0}),
    ],
)
def test_the_command_line_takes_precedence_over_a_file(
    of_file: dict[str, Any], given: dict[str, Any], found: dict[str, Any]
) -> None:
    assert merged(of_file, given) == found


@pytest.mark.parametrize("name", TIMES)
def test_the_help_says_the_default_of_chips(name: str) -> None:
    assert TIMES[name].endswith(f" ({as_time(getattr(Chips(count=1), f'{name}_s'))})")
