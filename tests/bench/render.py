"""Tables of stored results into READMEs: `python -m tests.bench.render`. Nobody types a number."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import quality, report
from tests.bench.tiny import RECIPE

Results = dict[str, Any]
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Table:
    """Where results are stored, where their table belongs, and how it is made."""

    results: Path
    readme: Path
    make: Callable[[Results], str]


def _rows(found: Results) -> str:
    columns = ["run", *(name for name in found["rows"][0] if name != "run")]
    return "\n\n".join(filter(None, (report.table(found["rows"], columns), _checks(found))))


def _checks(found: Results) -> str:
    checks = found.get("checks", {})
    return "\n".join(f"- {'holds' if holds else '**fails**'}: {what}" for what, holds in checks.items())


def _losses(found: Results) -> str:
    return quality.summary(found["results"])


def _survivors(found: Results) -> str:
    about = "What two learners that sleep in each step notice of faults that hit a third one and the syncer."
    return f"{about}\n\n{_rows(found)}"


def _busy_survivors(found: Results) -> str:
    about = "What a learner of the recipe, busy in each step, notices when the other one is killed."
    return f"{about}\n\n{_rows(found)}"


def _loss_by_participation(found: Results) -> str:
    rows = [row for row in found["rows"] if row["task"] == "classifier"]
    columns = ["run", "participation", "loss", "against all", "against plain"]
    return f"{report.table(rows, columns)}\n\n{_checks(found)}"


TINY, PROJECT = RECIPE.parent / "README.md", HERE.parents[1] / "README.md"
TABLES = {
    "quality": Table(RECIPE.parent / "results" / "quality.json", TINY, _losses),
    "sweep": Table(RECIPE.parent / "results" / "sweep.json", TINY, _losses),
    "loss_by_participation": Table(HERE / "results" / "loss_by_participation.json", PROJECT, _loss_by_participation),
    "exchange": Table(HERE / "results" / "exchange.json", PROJECT, _rows),
    "straggler": Table(HERE / "results" / "straggler.json", PROJECT, _rows),
    "xla_step": Table(HERE / "results" / "xla_step.json", PROJECT, _rows),
    "ranks_step": Table(HERE / "results" / "ranks_step.json", PROJECT, _rows),
    "forecast": Table(RECIPE.parent / "results" / "forecast.json", TINY, _rows),
    "memory": Table(RECIPE.parent / "results" / "memory.json", TINY, _rows),
    "chaos": Table(RECIPE.parent / "results" / "chaos.json", TINY, _rows),
    "recoveries": Table(HERE / "results" / "recoveries.json", TINY, _checks),
    "survivors": Table(HERE / "results" / "survivors.json", TINY, _survivors),
    "busy_survivors": Table(HERE / "results" / "busy_survivors.json", TINY, _busy_survivors),
    "soak": Table(HERE / "results" / "soak.json", TINY, _rows),
}


def rendered() -> dict[str, str]:
    """The text between the markers of each name that has stored results."""
    texts = {}
    for name, table in TABLES.items():
        if not table.results.exists():
            print(f"{name}: no stored results, its README is left as it is")
            continue
        found = json.loads(table.results.read_text())
        texts[name] = f"{table.make(found)}\n\n{_origin(found['circumstances'])}"
    return texts


def _origin(seen: dict[str, str]) -> str:
    load = f" (load average {seen['load']})" if "load" in seen else ""
    return (
        f"{seen['date']}, commit {seen['commit']}, {seen['machine']}{load}, Python {seen['python']}, "
        f"torch {seen['torch']}; made by `python -m tests.bench.render` from stored results."
    )


def main() -> None:
    """Rewrite the READMEs."""
    for name, text in rendered().items():
        report.insert(TABLES[name].readme, name, text)


if __name__ == "__main__":
    main()
