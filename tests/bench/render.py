"""Writes tables of stored results into READMEs: `python -m tests.bench.render`. No number is typed by hand."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.bench import (
    fine_tuning,
    fleets,
    goodput_table,
    outer_rules,
    peers,
    quality,
    report,
    simulated,
    speeds,
    wide_area,
)
from tests.bench.tiny import RECIPE, Tiny

Results = dict[str, Any]
HERE = Path(__file__).parent


def _rows(found: Results) -> str:
    columns = sorted(found["rows"][0], key=lambda name: name != "run")
    return "\n\n".join(filter(None, (report.table(found["rows"], columns), _checks(found))))


def _with(columns: Iterable[str]) -> Callable[[Results], str]:
    return lambda found: f"{report.table(found['rows'], columns)}\n\n{_checks(found)}"


def _checks(found: Results) -> str:
    checks = found.get("checks", {})
    return "\n".join(f"- {'holds' if holds else '**fails**'}: {what}" for what, holds in checks.items())


def _losses(found: Results) -> str:
    """Return a table of the runs with default options, and one each of larger models, of Muon, and of all others."""
    rows = sorted(quality.compared(found), key=_by_task)
    always = {"usual": (), "larger": ("model", "learners", "steps"), "muon": ("optimizer", "learners"), "other": ()}
    tables = [([row for row in rows if _kind(row) == kind], shown) for kind, shown in always.items()]
    return "\n\n".join(quality.summary(some, shown) for some, shown in tables if some)


def _kind(row: dict[str, Any]) -> str:
    if row["optimizer"] != "adamw":
        return str(row["optimizer"])
    if row["model"] != "recipe":
        return "larger"
    usual = Tiny().strategy | {
        "merge": "mean",
        "outer_lr": "auto",
        "outer_momentum": 0.6,
        "batch_size": Tiny().batch_size,
    }
    return "usual" if all(row[name] == value for name, value in usual.items()) else "other"


def _by_task(row: dict[str, Any]) -> tuple[Any, ...]:
    return (-row["batch_size"], row["steps"], row["learners"], -row["sync_every"], sum(row["anchor"]))


def _loss_by_participation(found: Results) -> str:
    rows = [row for row in found["rows"] if row["task"] == "classifier"]
    columns = ["run", "participation", "loss", "against all", "against plain"]
    return f"{report.table(rows, columns)}\n\n{_checks(found)}"


def _goodput(found: Results) -> str:
    cells = found["cells"]
    more = (
        goodput_table.residuals(cells),
        goodput_table.bands(found["half"], found["double"]),
        goodput_table.cubes(found["cubes"]),
        goodput_table.beside_published(found["two_speeds"]),
        found["scavenging"],
        found["real"],
        found["costs"],
        goodput_table.answers(cells),
    )
    return "\n\n".join((_rows(found), *map(report.table, more)))


def _simulated(found: Results) -> str:
    table = _with(simulated.COLUMNS)(found)
    return f"{table}\n\n{report.table(simulated.spreads(found['rows'], found['runs']))}"


def _bandwidth(found: Results) -> str:
    return "\n\n".join((report.table(found["rows"]), _checks(found), report.table(found["eight_sites"])))


def _gpu(found: Results) -> str:
    parts = [rows for rows in found.values() if isinstance(rows, list)]
    return "\n\n".join((*map(report.table, parts), _checks(found)))


def _broken_learner(found: Results) -> str:
    by_kind: dict[str, dict[str, Any]] = {}
    for row in found["rows"][1:]:
        shown = by_kind.setdefault(row["fourth learner"], {"fourth learner": row["fourth learner"]})
        shown[row["broken"]] = row["against three"]
        if row["broken"] == "from the start":
            shown |= {"merged": row["merged"], "quarantined at step": row["quarantined at step"]}
    columns = ["fourth learner", "from the start", "merged", "quarantined at step", "from half time on", "control"]
    return f"{report.table(list(by_kind.values()), columns)}\n\n{_checks(found)}"


def _peers(found: Results) -> str:
    names = {name: f"{name} {version}" for name, version in found["versions"].items()}
    rows = [{names.get(key, key): value for key, value in row.items()} for row in found["rows"]]
    missing = [f"- {name} could not be installed: {why}" for name, why in found["refused"].items()]
    return "\n\n".join((report.table(rows), "\n".join((_checks(found), *missing))))


def _beside(what: str, form: Callable[[float], str]) -> Callable[[Results], str]:
    def shown(found: Results) -> str:
        middle = {name: form(statistics.median(one[what] for one in runs)) for name, runs in found["found"].items()}
        ours = middle.pop(peers.OURS)
        return f"{ours}; {', '.join(f'{name} {value}' for name, value in middle.items())}"

    return shown


BENCH, PROJECT = HERE / "README.md", report.ROOT / "README.md"
OF_THE_RECIPE = ("quality", "quality_by_learners", "fine_tuning", "outer_rules", "forecast", "memory", "chaos")
TABLES: dict[str, Callable[[Results], str]] = {
    **dict.fromkeys(("quality", "quality_by_learners"), _losses),
    "fine_tuning": _with(fine_tuning.COLUMNS),
    "outer_rules": outer_rules.summary,
    "loss_by_participation": _loss_by_participation,
    "broken_learner": _broken_learner,
    "recoveries": _checks,
    **dict.fromkeys(
        ("exchange", "straggler", "speeds", "xla_step", "ranks_step", "attacks", "forecast", "memory"), _rows
    ),
    "goodput_table": _goodput,
    **dict.fromkeys(("chaos", "survivors", "busy_survivors", "loop", "syncer_round"), _rows),
    **dict.fromkeys(("streams", "soak", "takeovers", "takeovers_shards", "at_size", "shards"), _rows),
    "peers": _peers,
    "simulated": _simulated,
    "bandwidth": _bandwidth,
    "gpu": _gpu,
    "fleets": _with(fleets.COLUMNS),
    "wide_area": _with(wide_area.COLUMNS),
}


def stored(name: str) -> Path:
    """Return the path of a benchmark's results."""
    return (RECIPE.parent if name in OF_THE_RECIPE else HERE) / "results" / f"{name}.json"


def _row(found: Results, run: str) -> dict[str, Any]:
    return next(row for row in found["rows"] if row["run"] == run)


def _cell(found: Results, run: str, chips: float) -> dict[str, Any]:
    return next(cell for cell in found["cells"] if (cell["run"], cell["chips"]) == (run, chips))


def _sentence(found: Results, begins: str) -> str:
    """Return the first check with this beginning, and mark it if it fails."""
    what, holds = next((what, holds) for what, holds in found["checks"].items() if what.startswith(begins))
    return what if holds else f"**fails**: {what}"


def _gaps(found: Results) -> str:
    (row,) = quality.compared(found)
    gaps = row["gaps"]
    return f"loss {sum(gaps) / len(gaps):+.2%}, at worst {max(gaps):+.2%}"


def _long_run(found: Results, learners: int) -> Results:
    usual = [row for row in quality.compared(found) if _kind(row) == "usual"]
    runs = [row for row in usual if row["steps"] == 2400 and row["learners"] == learners]
    return max(runs, key=lambda row: len(row["seeds"]))


def _long_gaps(found: Results, learners: int) -> str:
    gaps = _long_run(found, learners)["gaps"]
    return f"loss {statistics.mean(gaps):+.2%}, at worst {max(gaps):+.2%}"


def _when(name: str, found: Results) -> str:
    """Return date and commit of the results that the README shows."""
    if name == "quality_by_learners":
        return "; ".join(sorted({_long_run(found, learners)["when"] for learners in (2, 4)}))
    if name == "speeds":
        return str(_row(found, speeds.UNEQUAL)["when"])
    return f"{found['circumstances']['date']}, {found['circumstances']['commit']}"


# Rows of the README's table: description, name of the stored results, and function that formats the value.
SUMMARY: dict[str, tuple[str, Callable[[Results], str]]] = {
    "two learners against data parallel, the same tokens, the best learning rate for each, three seeds": (
        "quality",
        _gaps,
    ),
    "the same with 100 rounds of each fragment instead of 60; two learners, or four": (
        "quality_by_learners",
        lambda found: f"{_long_gaps(found, 2)}; {_long_gaps(found, 4)}",
    ),
    "four learners, a quarter of them in each round, against all in each": (
        "loss_by_participation",
        lambda found: f"loss {_row(found, 'a quarter')['against all']:+.1%}",
    ),
    "one of four learners is ten times slower; leased data, or in fixed parts": (
        "loss_by_participation",
        lambda found: (
            f"loss {_row(found, 'one is 10x slower, leased data')['against all']:+.1%}, or "
            f"{_row(found, 'one is 10x slower')['against all']:+.1%}"
        ),
    ),
    "one of two learners is four times slower; the same tokens as two equal ones, three seeds": (
        "speeds",
        lambda found: (
            f"loss {_row(found, speeds.UNEQUAL)['loss'] / _row(found, speeds.EQUAL)['loss'] - 1:+.1%}; each learner is "
            f"idle for at most {max(_row(found, speeds.UNEQUAL)[f'idle, {who}'] for who in ('fast', 'slow')):.1%}"
        ),
    ),
    "training stands still for an exchange, 95 of 100": (
        "exchange",
        lambda found: f"at most {_row(found, 'int8')['stall p95 [ms]']:.1f} ms",
    ),
    "bytes up and down, against float32": (
        "exchange",
        lambda found: f"{_row(found, 'int8')['up / float32']:.3f}, {_row(found, 'int8')['down / float32']:.3f}",
    ),
    "four learners behind 40 ms, with the traffic of 12B at 5, 2.5 and 1.25 Gbit/s, scaled down": (
        "wide_area",
        lambda found: f"compute utilization at least {min(row['utilization'] for row in found['rows'][:-1]):.1%}",
    ),
    "64 learners at one syncer; they sleep instead of computing": (
        "fleets",
        lambda found: f"{_row(found, 'M = 64')['take part']:.0%} take part in a round",
    ),
    "a round of 490M parameters, a 24th of a 12B model, with four contributions": (
        "at_size",
        lambda found: f"{found['rows'][0]['last byte to offer [s]']:.1f} s from the last byte to the update",
    ),
    "training stands still while 25M parameters are exchanged once; the same with other packages": (
        "peers",
        _beside("stands still [ms per period]", "{:.0f} ms".format),
    ),
    "share of time that a learner loses beside one that is four times slower; the same with other packages": (
        "peers",
        _beside("share of time lost beside a slower one", "{:.1%}".format),
    ),
    "one of two learners is killed: the other's longest step of 0.25 s; the same with other packages": (
        "peers",
        _beside("longest step after kill -9 of the other [s]", "{:.2f} s".format),
    ),
    "others' longest step while learners and the syncer are killed": (
        "survivors",
        lambda found: _sentence(found, "the longest step is"),
    ),
    "the syncer is killed or vanishes twenty times; its standby takes over": (
        "takeovers",
        lambda found: _sentence(found, "rounds go on"),
    ),
    "the syncer is killed twenty times within its writes": (
        "recoveries",
        lambda found: _sentence(found, "20 of 20"),
    ),
    "8 learners on 1.2M chips that fail once a year, simulated (published: 88%)": (
        "goodput_table",
        lambda found: f"goodput {_cell(found, '8 learners', 1.2e6)['goodput']:.1%}",
    ),
    "four learners under 85 faults per hour": ("chaos", lambda found: _sentence(found, "loss at equal")),
    "FSDP2 inside a learner of two ranks": ("ranks_step", lambda found: _sentence(found, "fsdp2: 0.9")),
    "an XLA device (PJRT's CPU), a fragment in every step": ("xla_step", lambda found: _sentence(found, "0.9")),
}


def summary() -> str:
    """Return the table of the README."""
    rows, machines = [], set()
    for what, (name, figure) in SUMMARY.items():
        found = json.loads(stored(name).read_text())
        rows.append({"what": what, "measured": figure(found), "when": _when(name, found)})
        machines.add(found["circumstances"]["machine"].partition(",")[0])
    made = "made by `python -m tests.bench.render` from stored results"
    return f"{report.table(rows)}\n\nOn two cores ({', '.join(sorted(machines))}); {made}."


def rendered() -> dict[str, str]:
    """Return the text between the markers, for each name with stored results."""
    texts = {}
    for name, make in TABLES.items():
        if not stored(name).exists():
            print(f"{name}: no stored results; its README is unchanged")
            continue
        found = json.loads(stored(name).read_text())
        seen = found["circumstances"]
        if "anchors" in found:  # trials of several days
            seen = {**seen, "when": quality.when([*found["data_parallel"], *found["anchors"]])}
        texts[name] = f"{make(found)}\n\n{_origin(seen)}"
    return texts


def _origin(seen: dict[str, str]) -> str:
    machine = ", ".join(seen[name] for name in ("card", "machine") if name in seen)
    load = f" (load average {seen['load']})" if "load" in seen else ""
    when = seen.get("when", f"{seen['date']}, commit {seen['commit']}")
    return (
        f"{when}, {machine}{load}, Python {seen['python']}, "
        f"torch {seen['torch']}; made by `python -m tests.bench.render` from stored results."
    )


def main() -> None:
    """Rewrite the READMEs."""
    report.insert(PROJECT, "summary", summary())
    for name, text in rendered().items():
        report.insert(BENCH, name, text)


if __name__ == "__main__":
    main()
