"""Tables of stored results into the README of the recipe: `python -m tests.bench.render`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.bench import quality, report
from tests.bench.tiny import RECIPE

README = RECIPE.parent / "README.md"
RESULTS = RECIPE.parent / "results"
NAMES = ("quality", "sweep")


def rendered(results: Path = RESULTS) -> dict[str, str]:
    """The text between the markers of each name, from what is stored under it."""
    stored = {name: json.loads((results / f"{name}.json").read_text()) for name in NAMES}
    return {name: f"{_table(found)}\n\n{_origin(found['circumstances'])}" for name, found in stored.items()}


def _table(found: dict[str, object]) -> str:
    results: Sequence[dict[str, object]] = found["results"]  # type: ignore[assignment]
    return quality.summary(results)


def _origin(seen: dict[str, str]) -> str:
    return (
        f"{seen['date']}, commit {seen['commit']}, {seen['machine']}, Python {seen['python']}, torch {seen['torch']}; "
        "made by `python -m tests.bench.render` from `results/`."
    )


def main() -> None:
    """Rewrite the README."""
    for name, text in rendered().items():
        report.insert(README, name, text)


if __name__ == "__main__":
    main()
