"""Common parts of all benchmarks: options, and results as JSON, as Markdown, and in READMEs.

1. Tables are always made from stored results. No number is typed by hand.
2. Generated text in a README is between `<!-- bench NAME -->` and `<!-- /bench NAME -->`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
ROOT = Path(__file__).parents[2]


def options(about: str | None) -> argparse.ArgumentParser:
    """Return a parser that has the docstring of a benchmark as its help, and `--out`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the results")
    return parser


def conclude(
    out: Path | None,
    rows: Sequence[Row],
    checks: Mapping[str, bool],
    *,
    columns: Iterable[str] | None = None,
    command: str | None = None,
    **found: Any,
) -> int:
    """Print the table and the checks, and store them.

    Args:
        out: file for the results; None: nothing is stored.
        rows: rows of the table.
        checks: whether each sentence holds.
        columns: columns to print; default: those of the first row.
        command: command that gives these results, if not that of all benchmarks.
        found: more results to store.

    Returns:
        The exit code: 1 if a check fails.
    """
    print(table(rows, columns))
    print("\n" + verdicts(checks))
    seen = circumstances() | ({} if command is None else {"command": command})
    store(out, {"circumstances": seen, "rows": rows, "checks": checks, **found})
    return int(not all(checks.values()))


def circumstances() -> dict[str, str]:
    """Return the circumstances of a measurement: machine, load, versions, commit and date."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": found.stdout.strip(),
        "machine": f"{_processor()}, {torch.get_num_threads()} thread(s)",
        "load": f"{os.getloadavg()[1]:.1f} on {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1) if found else platform.machine()


def table(rows: Sequence[Row], columns: Iterable[str] | None = None) -> str:
    """Format rows as a Markdown table; the columns default to those of the first row."""
    names = list(columns or rows[0])
    cells = [names, *([_text(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[k]) for line in cells) for k in range(len(names))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def verdicts(checks: Mapping[str, bool]) -> str:
    """Return a line for each check: whether it holds, and its text."""
    return "\n".join(f"{'holds' if holds else 'FAILS'}: {sentence}" for sentence, holds in checks.items())


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median_of(rows: Sequence[Row]) -> Row:
    """Return the median of each column over several runs."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def store(path: Path | None, results: dict[str, Any]) -> None:
    """Write results as JSON if a path is given; each list of numbers takes one line."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(results, indent=1)
        text = re.sub(r"\[\n[-\d.e,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text)
        path.write_text(text + "\n")


def insert(readme: Path, name: str, text: str) -> None:
    """Replace the text between a README's markers.

    Raises:
        ValueError: the README has no such markers.
    """
    before = readme.read_text()
    opening, closing = f"<!-- bench {name} -->", f"<!-- /bench {name} -->"
    if opening not in before or closing not in before:
        raise ValueError(f"{readme} has no {opening} ... {closing}; add both lines at the place of the table")
    head, tail = before.split(opening)[0], before.split(closing)[1]
    readme.write_text(f"{head}{opening}\n{text.strip()}\n{closing}{tail}")
