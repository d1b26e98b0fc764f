"""Writes tables of stored results into READMEs: `python -m tests.bench.render`. No number is typed by hand."""

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
    """The location of stored results, the README of their table, and the function that makes it."""

    results: Path
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


def _broken_learner(found: Results) -> str:
    by_kind: dict[str, dict[str, Any]] = {}
    for row in found["rows"][1:]:
        shown = by_kind.setdefault(row["fourth learner"], {"fourth learner": row["fourth learner"]})
        shown[row["broken"]] = row["against three"]
        if row["broken"] == "from the start":
            shown |= {"merged": row["merged"], "quarantined at step": row["quarantined at step"]}
    columns = ["fourth learner", "from the start", "merged", "quarantined at step", "from half time on", "control"]
    return f"{report.table(list(by_kind.values()), columns)}\n\n{_checks(found)}"


BENCH, PROJECT = HERE / "README.md", HERE.parents[1] / "README.md"
TABLES = {
    "quality": Table(RECIPE.parent / "results" / "quality.json", _losses),
    "sweep": Table(RECIPE.parent / "results" / "sweep.json", _losses),
    "loss_by_participation": Table(HERE / "results" / "loss_by_participation.json", _loss_by_participation),
    "broken_learner": Table(HERE / "results" / "broken_learner.json", _broken_learner),
    "exchange": Table(HERE / "results" / "exchange.json", _rows),
    "straggler": Table(HERE / "results" / "straggler.json", _rows),
    "xla_step": Table(HERE / "results" / "xla_step.json", _rows),
    "ranks_step": Table(HERE / "results" / "ranks_step.json", _rows),
    "syncer_round": Table(HERE / "results" / "syncer_round.json", _rows),
    "attacks": Table(HERE / "results" / "attacks.json", _rows),
    "forecast": Table(RECIPE.parent / "results" / "forecast.json", _rows),
    "memory": Table(RECIPE.parent / "results" / "memory.json", _rows),
    "chaos": Table(RECIPE.parent / "results" / "chaos.json", _rows),
    "recoveries": Table(HERE / "results" / "recoveries.json", _checks),
    "survivors": Table(HERE / "results" / "survivors.json", _survivors),
    "busy_survivors": Table(HERE / "results" / "busy_survivors.json", _busy_survivors),
    "loop": Table(HERE / "results" / "loop.json", _rows),
    "soak": Table(HERE / "results" / "soak.json", _rows),
}


def _row(found: Results, run: str) -> dict[str, Any]:
    return next(row for row in found["rows"] if row["run"] == run)


def _sentence(found: Results, begins: str) -> str:
    """Return the first check with this beginning, and mark it if it fails."""
    what, holds = next((what, holds) for what, holds in found["checks"].items() if what.startswith(begins))
    return what if holds else f"**fails**: {what}"


def _gaps(found: Results) -> str:
    gaps = [result["gap"] for result in found["results"]]
    return f"loss {sum(gaps) / len(gaps):+.2%}, at worst {max(gaps):+.2%}"


# Rows of the README's table: description, name of the stored results, and function that formats the value.
SUMMARY: dict[str, tuple[str, Callable[[Results], str]]] = {
    "two learners against data parallel, the same tokens, three seeds": ("quality", _gaps),
    "four learners, a quarter of them in each round, against all in each": (
        "loss_by_participation",
        lambda found: f"loss {_row(found, 'a quarter')['against all']:+.1%}",
    ),
    "one of four learners is ten times slower": (
        "loss_by_participation",
        lambda found: f"loss {_row(found, 'one is 10x slower')['against all']:+.1%}",
    ),
    "training stands still for an exchange, 95 of 100": (
        "exchange",
        lambda found: f"at most {_row(found, 'int8')['stall p95 [ms]']:.1f} ms",
    ),
    "bytes up and down, against float32": (
        "exchange",
        lambda found: f"{_row(found, 'int8')['up / float32']:.3f}, {_row(found, 'int8')['down / float32']:.3f}",
    ),
    "a learner beside one that is four times slower": (
        "straggler",
        lambda found: _sentence(found, "its steps are"),
    ),
    "others' longest step while learners and the syncer are killed": (
        "survivors",
        lambda found: _sentence(found, "the longest step is"),
    ),
    "the syncer is killed twenty times within its writes": (
        "recoveries",
        lambda found: _sentence(found, "20 of 20"),
    ),
    "four learners under 85 faults per hour": ("chaos", lambda found: _sentence(found, "loss at equal")),
    "FSDP2 inside a learner of two ranks": ("ranks_step", lambda found: _sentence(found, "fsdp2: 0.9")),
    "an XLA device (PJRT's CPU), a fragment in every step": ("xla_step", lambda found: _sentence(found, "0.9")),
}


def summary() -> str:
    """Return the table of the README."""
    rows, machines = [], set()
    for what, (name, figure) in SUMMARY.items():
        found = json.loads(TABLES[name].results.read_text())
        seen = found["circumstances"]
        rows.append({"what": what, "measured": figure(found), "when": f"{seen['date']}, {seen['commit']}"})
        machines.add(seen["machine"].partition(",")[0])
    made = "made by `python -m tests.bench.render` from stored results"
    return f"{report.table(rows)}\n\nOn two cores ({', '.join(sorted(machines))}); {made}."


def rendered() -> dict[str, str]:
    """Return the text between the markers, for each name with stored results."""
    texts = {}
    for name, table in TABLES.items():
        if not table.results.exists():
            print(f"{name}: no stored results; its README is unchanged")
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
    report.insert(PROJECT, "summary", summary())
    for name, text in rendered().items():
        report.insert(BENCH, name, text)


if __name__ == "__main__":
    main()
