"""Quantities on the command line."""

from __future__ import annotations

import argparse

import pytest

from lightning_diloco.cli.text.quantities import as_time, count, positive, seconds, share, whole

YEAR_S = 365.25 * 86400


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (YEAR_S, "1y"),
        (1e6 * YEAR_S, "1000000y"),
        (365 * 86400, "365d"),
        (90 * 86400, "90d"),
        (7500, "125min"),
        (20_000, "5.56h"),
        (5400, "1.5h"),
        (76, "76s"),
        (60, "1min"),
        (0.04, "40ms"),
        (1e-8, "0.01us"),
        (0, "0"),
    ],
)
def test_a_time_has_a_unit_of_its_size_and_can_be_parsed_again(value_s: float, text: str) -> None:
    assert as_time(value_s) == text
    if value_s:
        assert seconds(text) == pytest.approx(value_s, rel=0.01)


def test_numbers_of_json_can_be_parsed_again() -> None:
    assert [count("5e9"), count("1e+16"), seconds("1e-05"), share("1e-05")] == [5e9, 1e16, 1e-5, 1e-5]


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (seconds, "0s", "a time such as 200ms, 2s, 30m or 6h, above 0"),
        (seconds, "-5", "'-5': must be a time"),
        (positive, "0", "'0': must be a whole number of at least 1"),
        (positive, "1.5", "'1.5': must be a whole number of at least 1"),
        (whole, "-1", "'-1': must be a whole number of at least 0"),
        (share, "100%", "a share below 1"),
    ],
)
def test_bad_quantities_are_refused(parse: object, text: str, said: str) -> None:
    assert callable(parse)
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        parse(text)
