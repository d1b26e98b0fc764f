"""Parses times, rates, sizes, numbers and shares of a command line: 40ms, 5Gbit, 80GiB, 1.2M, 5%; formats times."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping

_SECONDS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400,
}  # fmt: skip
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_NUMBERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_BYTES = {
    "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip
_NUMBER = r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"


def seconds(text: str) -> float:
    """Parse a time in seconds; without a unit, the number is in seconds."""
    return _quantity(text, _SECONDS, "s", "a time such as 200ms, 2s, 30m or 6h")


def bits(text: str) -> float:
    """Parse a rate in bits per second."""
    return _quantity(text.removesuffix("/s"), _BITS, None, "a rate such as 500Mbit or 5Gbit")


def count(text: str) -> float:
    """Parse a large number."""
    return _quantity(text, _NUMBERS, "", "a number such as 64, 150k, 1.2M or 12B")


def nbytes(text: str) -> int:
    """Parse a size in bytes."""
    return int(_quantity(text, _BYTES, "b", "a size such as 80GiB or 1TB"))


def share(text: str) -> float:
    """Parse a share of at least 0 and less than 1."""
    matched = re.fullmatch(_NUMBER + r"\s*(%?)", text.strip())
    value = float(matched[1]) / (100 if matched[2] else 1) if matched else 1.0
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a share below 1, such as 5% or 0.05")
    return value


def whole(text: str, *, least: int = 0) -> int:
    """Parse a whole number of at least `least`."""
    number = int(text) if re.fullmatch(r"\d+", text.strip()) else -1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least {least}")
    return number


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    return whole(text, least=1)


def as_time(value_s: float) -> str:
    """Format a time with three digits, in a form that `seconds` parses: 1y, 90min, 2.08h, 40ms."""
    sizes = sorted(((size, unit) for unit, size in _SECONDS.items() if unit != "m"), reverse=True)
    fitting = [(value_s / size, unit) for size, unit in sizes if value_s >= size] or [(value_s / _SECONDS["us"], "us")]
    even = [(number, unit) for number, unit in fitting if number < 1000 and math.isclose(number, _rounded(number))]
    number, unit = (even or fitting)[0]
    return f"{_rounded(number):.15g}{unit}" if value_s else "0"


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def _quantity(text: str, units: Mapping[str, float], default: str | None, allowed: str) -> float:
    matched = re.fullmatch(_NUMBER + r"\s*([a-zA-Z]*)", text.strip())
    size = units.get(matched[2].lower() or default or "") if matched else None
    value = float(matched[1]) * size if matched and size is not None else 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be {allowed}, above 0 and finite")
    return value
