"""Checks for leaks of memory, threads and files in a syncer and its learners, sampled from outside.

python -m tests.bench.soak --out tests/bench/results/soak.json

1. The processes are those of `diloco run`. Learners sleep in each step, so that the run costs little. Every few seconds
   /proc is sampled for anonymous memory, threads and open files of each process. The first two fifths of the run are
   left out, because caches fill then. The rest is divided into blocks of some minutes.
2. The syncer's memory goes up and down. It is flat if its slope over the blocks is within the noise. The noise bound is
   set so that a syncer and three learners that do not leak are all called flat in 95 of 100 runs.
3. A learner's memory never goes down, because allocators keep memory. It is the running maximum of a varying demand,
   and grows with the logarithm of time, while a leak adds the same amount in each block. A regression on both separates
   them; the memory is flat if the linear slope is within its noise.
4. The control is an additional learner of the same run that leaks a small object per step. It must not be flat.
5. Libraries sometimes have one more thread or file. Their number is constant if the minimum of the last block does not
   exceed the maximum of the first.
6. The same Trainer runs without the strategy next to them for comparison. Nothing is checked there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from lightning_diloco.cli.local.feed import Status
from lightning_diloco.cli.local.fleet import Fleet
from tests.bench import local_run, report

SAMPLE_S = 2.0
MIN_MINUTES = 2.0
WARM_UP_SHARE = 0.4
NUM_BLOCKS = 10
T = 2.752  # (1 - 0.05 / 4) quantile of Student's t with NUM_BLOCKS - 2 degrees of freedom, see rule 2
FIGURES = ("memory_bytes", "threads", "files")
SYNCER, PLAIN, CONTROL = "syncer", "without", "control"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Trend:
    """The trend of one process's memory.

    Args:
        slope_bps: bytes per second.
        noise_bps: noise of the slope, in bytes per second.
    """

    slope_bps: float
    noise_bps: float

    @property
    def is_flat(self) -> bool:
        """Whether the slope is within the noise."""
        return self.slope_bps <= self.noise_bps


def trend(times_s: Sequence[float], values: Sequence[float], *, is_kept: bool) -> Trend:
    """Return the trend of samples, by least squares over the means of blocks.

    Args:
        times_s: seconds since the process began its work.
        values: samples at these times, without the warm-up.
        is_kept: whether memory is never given back, see rule 3.
    """
    blocks = np.array_split(np.column_stack([times_s, values]), NUM_BLOCKS + is_kept)
    t, y = np.array([block.mean(axis=0) for block in blocks]).T
    if is_kept:
        causes, effects = np.column_stack([np.diff(t), np.diff(np.log(t))]), np.diff(y)
    else:
        causes, effects = (t - t.mean())[:, None], y - y.mean()
    found, *_ = np.linalg.lstsq(causes, effects, rcond=None)
    unexplained = ((effects - causes @ found) ** 2).sum() / (NUM_BLOCKS - 2)
    error = np.sqrt(unexplained * np.linalg.inv(causes.T @ causes)[0, 0])
    return Trend(float(found[0]), float(T * error))


class Sampler:
    """Samples every process of a local run; passed to `execute` in place of a `FaultInjector`.

    Args:
        names: names of the run's processes.
        others: other processes to sample, by name.
        until_s: unix seconds after which the run is ending.
    """

    def __init__(self, names: Sequence[str], others: Mapping[str, subprocess.Popen[bytes]], until_s: float) -> None:
        self.samples: dict[str, list[tuple[float, int, int, int]]] = {name: [] for name in (*names, *others)}
        self._names, self._others, self._until_s = names, others, until_s
        self._began_s = self._next_s = 0.0

    def __call__(self, fleet: Fleet, status: Status | None) -> None:
        """Take a sample if one is due; the first is taken when the first learner steps."""
        now_s = time.time()
        if not self._began_s and status is not None and any(learner["step"] > 0 for learner in status["learners"]):
            self._began_s = self._next_s = now_s
        if not self._began_s or not self._next_s <= now_s < self._until_s:
            return
        self._next_s += SAMPLE_S
        pids = {name: fleet.pid(name) for name in self._names if fleet.outcome(name) == "running"}
        pids |= {name: process.pid for name, process in self._others.items() if process.poll() is None}
        for name, pid in pids.items():
            self.samples[name].append((now_s - self._began_s, *_look(pid)))


def _look(pid: int) -> tuple[int, int, int]:
    """Return anonymous memory, threads and open files of a process."""
    process = psutil.Process(pid)
    held = process.memory_info()
    return held.rss - held.shared, process.num_threads(), process.num_fds()


def soak(minutes: float, *, learners: int, step_s: float, leak_bytes: int) -> dict[str, Any]:
    """Run once, with a last learner that leaks; return the samples, and whether the run ended well."""
    until_s = time.time() + 60.0 * minutes
    options = ["--until-s", until_s, "--step-s", step_s]
    learner = ("tests.bench.idle_learner", *options, "--leak-bytes", leak_bytes, "--leaker", f"l{learners}")
    plain_argv = (sys.executable, "-m", "tests.bench.idle_learner", *map(str, options), "--plain")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(report.ROOT)}
    with tempfile.TemporaryDirectory(prefix="diloco-soak-") as name, ExitStack() as stack:
        plain = stack.enter_context(subprocess.Popen(plain_argv, cwd=name, env=env))
        stack.callback(plain.kill)
        sampler = Sampler([SYNCER, *(f"l{k}" for k in range(learners + 1))], {PLAIN: plain}, until_s)
        ended = local_run.run(Path(name), learner, learners + 1, sampler)
    summary = ended.summary or {}
    return {
        "exit_code": ended.exit_code,
        "rounds": summary.get("rounds"),
        "ledger_exact": summary.get("ledger_exact"),
        "steps": sum(learner["step"] for learner in summary.get("learners", ())),
        "leaker": f"l{learners}",
        "samples": sampler.samples,
    }


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each process."""
    names = {found["leaker"]: f"{CONTROL}: {found['leaker']}, which leaks", PLAIN: f"a Trainer {PLAIN} the strategy"}
    return [
        _row(names.get(process, process), samples, is_kept=process != SYNCER)
        for process, samples in found["samples"].items()
    ]


def _row(name: str, samples: Sequence[tuple[float, int, int, int]], *, is_kept: bool) -> dict[str, Any]:
    settled = np.array(samples[int(WARM_UP_SHARE * len(samples)) :])
    seen = trend(settled[:, 0].tolist(), settled[:, 1].tolist(), is_kept=is_kept)
    first, last = np.array_split(settled, NUM_BLOCKS)[0], np.array_split(settled, NUM_BLOCKS)[-1]
    counts = {figure: f"{_span(first[:, k])} -> {_span(last[:, k])}" for k, figure in enumerate(FIGURES[1:], start=2)}
    grew = {figure: min(last[:, k]) > max(first[:, k]) for k, figure in enumerate(FIGURES[1:], start=2)}
    return {
        "run": name,
        "minutes": (settled[-1, 0] - settled[0, 0]) / 60,
        "memory [MiB]": f"{settled[0, 1] / MIB:.2f} -> {settled[-1, 1] / MIB:.2f}",
        "slope [MiB/h]": 3600 * seen.slope_bps / MIB,
        "noise [MiB/h]": 3600 * seen.noise_bps / MIB,
        **counts,
        "grew": ", ".join(figure for figure, more in {"memory": not seen.is_flat, **grew}.items() if more) or "-",
    }


def _span(counts: Sequence[float]) -> str:
    return "..".join(f"{count:g}" for count in sorted({min(counts), max(counts)}))


def checks_of(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Return the checks, including that of the control."""
    grew = [row["grew"] for row in rows if CONTROL not in row["run"] and PLAIN not in row["run"]]
    leaking = [row["grew"] for row in rows if CONTROL in row["run"]]
    return {
        "memory of every process is flat": not any("memory" in said for said in grew),
        "threads of every process are constant": not any("threads" in said for said in grew),
        "files of every process are constant": not any("files" in said for said in grew),
        "control: a learner that leaks is not flat": all("memory" in said for said in leaking),
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Plot memory, threads and files over time, with a line for each process."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from lightning_diloco.plots import panels, style

    colors = style.color_of(found["samples"])
    with rc_context(style.SETTINGS):
        figure = Figure(figsize=(9, 6), layout="constrained")
        for k, (axes, title) in enumerate(zip(figure.subplots(3, sharex=True), FIGURES, strict=True), start=1):
            ends = []
            for name, samples in found["samples"].items():
                (t, y), first = np.array(samples)[:, [0, k]].T, int(WARM_UP_SHARE * len(samples))
                if k == 1:
                    y = (y - y[first]) / MIB
                axes.plot(t / 60, y, color=colors[name])
                ends.append((t[-1] / 60, y[first:], name))
            axes.set_title("memory [MiB], since the first two fifths of the run" if k == 1 else title)
            lowest, highest = min(y.min() for _, y, _ in ends), max(y.max() for _, y, _ in ends)
            axes.set_ylim(lowest - 0.1 * (highest - lowest), highest + 0.1 * (highest - lowest))
            panels._label_ends(axes, [(t_end, y[-1], name, colors[name]) for t_end, y, name in ends])
        axes.set_xlabel("minutes since the first step")
        figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and store; return 1 if anything grows, or if the control does not."""
    parser = report.options(__doc__)
    parser.add_argument("--minutes", type=float, default=52.0, help="length of the run; two fifths are left out")
    parser.add_argument("--learners", type=int, default=3, help="learners, without the one that leaks")
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--leak-bytes", type=int, default=32, help="bytes that the control leaks per step")
    args = parser.parse_args(argv)
    if args.minutes < MIN_MINUTES:
        parser.error(f"--minutes {args.minutes:g}: at least {MIN_MINUTES:g}")
    found = soak(args.minutes, learners=args.learners, step_s=args.step_s, leak_bytes=args.leak_bytes)
    rows = rows_of(found)
    checks = {"the run ended by itself with an exact ledger": found["exit_code"] == 0 and found["ledger_exact"]}
    checks |= checks_of(rows)
    if args.out:
        draw(found, args.out.with_suffix(".png"))
    return report.conclude(args.out, rows, checks, found=found)


if __name__ == "__main__":
    raise SystemExit(main())
