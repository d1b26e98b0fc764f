"""Does anything grow while nothing happens? Memory, threads and files of a syncer and its learners, seen from outside.

python -m tests.bench.soak --out tests/bench/results/soak.json

1. Processes are those of `diloco run`; learners sleep in each step, so that the run costs little.
2. Every few seconds /proc says what each process has: anonymous memory, threads, open files. The first two
   fifths of the run are left out: caches fill, allocators find their size.
3. Memory is flat if its slope over means of ten blocks is within its own noise (95 %), or comes to less than one arena
   of Python's allocator over the whole time. Threads and files, of which libraries have one more now and then, are
   constant if the fewest of the last block are no more than the most of the first.
4. The control, a shorter run with a learner that keeps some bytes of each step, must not be flat.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from lightning_diloco.cli import run as cli_run
from lightning_diloco.cli.display import Screen
from lightning_diloco.cli.feed import Status
from lightning_diloco.cli.fleet import Fleet
from lightning_diloco.cli.interruption import Interruption
from lightning_diloco.cli.local_run import Plan, execute
from tests.bench import report

SAMPLE_S = 2.0
MIN_MINUTES = 2.0
WARM_UP_SHARE = 0.4
NUM_BLOCKS = 10
T_95 = 2.306  # Student's t of NUM_BLOCKS - 2 degrees of freedom, two-sided
ARENA_BYTES = 1 << 20
FIGURES = ("memory_bytes", "threads", "files")
ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Trend:
    """How one process's memory went.

    Args:
        slope_bps: bytes per second, least squares over block means.
        noise_bps: half of the slope's 95 % confidence interval.
        duration_s: of what was looked at.
    """

    slope_bps: float
    noise_bps: float
    duration_s: float

    @property
    def is_flat(self) -> bool:
        """Whether it did not grow, as far as one can tell."""
        return self.slope_bps <= self.noise_bps or self.slope_bps * self.duration_s < ARENA_BYTES


def trend(times_s: Sequence[float], values: Sequence[float]) -> Trend:
    """The trend of what was sampled, warm-up left out by the caller."""
    blocks = [np.array(block) for block in np.array_split(np.column_stack([times_s, values]), NUM_BLOCKS)]
    t, y = np.array([block.mean(axis=0) for block in blocks]).T
    spread = ((t - t.mean()) ** 2).sum()
    slope = ((t - t.mean()) * (y - y.mean())).sum() / spread
    residuals = y - y.mean() - slope * (t - t.mean())
    error = np.sqrt((residuals**2).sum() / (NUM_BLOCKS - 2) / spread)
    return Trend(float(slope), float(T_95 * error), times_s[-1] - times_s[0])


class Sampler:
    """Looks at every process of a local run; passed to `execute` where chaos passes its meddler.

    Args:
        names: of the processes.
        until_s: unix seconds from which on the run is ending.
    """

    def __init__(self, names: Sequence[str], until_s: float) -> None:
        self.samples: dict[str, list[tuple[float, int, int, int]]] = {name: [] for name in names}
        self._until_s = until_s
        self._began_s = self._next_s = 0.0

    def __call__(self, fleet: Fleet, status: Status | None) -> None:
        """Take a sample if it is time; the first one when the first learner steps."""
        now_s = time.time()
        if not self._began_s and status is not None and any(learner["step"] > 0 for learner in status["learners"]):
            self._began_s = self._next_s = now_s
        if not self._began_s or not self._next_s <= now_s < self._until_s:
            return
        self._next_s += SAMPLE_S
        for name, samples in self.samples.items():
            if fleet.outcome(name) == "running":
                samples.append((now_s - self._began_s, *_look(fleet.pid(name))))


def _look(pid: int) -> tuple[int, int, int]:
    """Anonymous memory, threads and open files of a process."""
    process = Path("/proc") / str(pid)
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return (
        int(fields["RssAnon"].split()[0]) * 1024,
        int(fields["Threads"]),
        len(list((process / "fd").iterdir())),
    )


def soak(minutes: float, *, learners: int, step_s: float, leak_bytes: int = 0) -> dict[str, Any]:
    """One run; what each process had, and whether the run ended well."""
    until_s = time.time() + 60.0 * minutes
    with tempfile.TemporaryDirectory(prefix="diloco-soak-") as name, Interruption() as interruption:
        options = ["--until-s", f"{until_s:.1f}", "--step-s", str(step_s), "--leak-bytes", str(leak_bytes)]
        plan = Plan(
            run_dir=Path(name),
            syncer_argv=cli_run.syncer_argv(Path(name), learners),
            learner_argv=(sys.executable, "-m", "tests.bench.idle_learner", *options),
            num_learners=learners,
            threads=1,
            max_restarts=0,
        )
        sampler = Sampler(["syncer", *plan.learners], until_s)
        with Screen(Console(), live=False, period_s=120.0) as screen:
            ended = execute(plan, screen, interruption, meddle=sampler)
    summary = ended.summary or {}
    return {
        "exit_code": ended.exit_code,
        "rounds": summary.get("rounds"),
        "ledger_exact": summary.get("ledger_exact"),
        "steps": sum(learner["step"] for learner in summary.get("learners", ())),
        "samples": sampler.samples,
    }


def rows_of(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """One line for each process."""
    return [_row(f"{name}, {process}", samples) for process, samples in found["samples"].items()]


def _row(name: str, samples: Sequence[tuple[float, int, int, int]]) -> dict[str, Any]:
    settled = np.array(samples[int(WARM_UP_SHARE * len(samples)) :])
    seen = trend(settled[:, 0].tolist(), settled[:, 1].tolist())
    first, last = np.array_split(settled, NUM_BLOCKS)[0], np.array_split(settled, NUM_BLOCKS)[-1]
    counts = {figure: f"{_span(first[:, k])} -> {_span(last[:, k])}" for k, figure in enumerate(FIGURES[1:], start=2)}
    grew = {figure: min(last[:, k]) > max(first[:, k]) for k, figure in enumerate(FIGURES[1:], start=2)}
    return {
        "run": name,
        "minutes": seen.duration_s / 60,
        "memory [MiB]": float(np.median(settled[:, 1])) / MIB,
        "slope [MiB/h]": 3600 * seen.slope_bps / MIB,
        "noise [MiB/h]": 3600 * seen.noise_bps / MIB,
        **counts,
        "grew": ", ".join(figure for figure, more in {"memory": not seen.is_flat, **grew}.items() if more) or "-",
    }


def _span(counts: Sequence[float]) -> str:
    return "..".join(f"{count:g}" for count in sorted({min(counts), max(counts)}))


def checks_of(rows: Sequence[dict[str, Any]], control: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """What has to hold."""
    grew = {row["run"]: row["grew"] for row in rows}
    checks = {
        "memory of every process is flat": not any("memory" in said for said in grew.values()),
        "threads of every process are constant": not any("threads" in said for said in grew.values()),
        "files of every process are constant": not any("files" in said for said in grew.values()),
    }
    if control:
        leaking = [row for row in control if not row["run"].endswith("syncer")]
        checks["control: learners that leak are not flat"] = all("memory" in row["grew"] for row in leaking)
    return checks


def draw(found: dict[str, Any], path: Path) -> None:
    """Memory, threads and files over time, a line for each process."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from lightning_diloco.plots import style

    colors = style.color_of(found["samples"])
    with rc_context(style.SETTINGS):
        figure = Figure(figsize=(9, 6), layout="constrained")
        for k, (axes, title) in enumerate(zip(figure.subplots(3, sharex=True), FIGURES, strict=True), start=1):
            for name, samples in found["samples"].items():
                t, y = zip(*((sample[0] / 60, sample[k] / (MIB if k == 1 else 1)) for sample in samples), strict=True)
                axes.plot(t, y, color=colors[name])
                style.label_end(axes, t[-1], y[-1], name, colors[name])
            axes.set_title("memory [MiB]" if k == 1 else title)
        axes.set_xlabel("minutes since the first step")
        figure.savefig(path)


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Run, print, store; 1 if anything grows, or the control does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=50.0, help="two fifths of them are left out")
    parser.add_argument("--control-minutes", type=float, default=4.0, help="0: no control")
    parser.add_argument("--learners", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--leak-bytes", type=int, default=16384, help="of the control, per step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.minutes < MIN_MINUTES or 0 < args.control_minutes < MIN_MINUTES:
        parser.error(f"--minutes {args.minutes:g} --control-minutes {args.control_minutes:g}: at least {MIN_MINUTES:g}")
    os.environ["PYTHONPATH"] = str(ROOT)  # for the learners
    size = {"learners": args.learners, "step_s": args.step_s}
    found = soak(args.minutes, **size)
    rows = rows_of(found, f"{args.minutes:g} minutes")
    leaking = soak(args.control_minutes, **size, leak_bytes=args.leak_bytes) if args.control_minutes else None
    control = rows_of(leaking, "control") if leaking else []
    checks = {"the run ended by itself with an exact ledger": found["exit_code"] == 0 and found["ledger_exact"]}
    checks |= checks_of(rows, control)
    say(report.table([*rows, *control]))
    say("\n" + report.verdicts(checks))
    stored = {"circumstances": report.circumstances(), "rows": [*rows, *control], "checks": checks, "found": found}
    report.store(args.out, stored)
    if args.out:
        draw(found, args.out.with_suffix(".png"))
    return int(not all(checks.values()))


if __name__ == "__main__":
    raise SystemExit(main())
