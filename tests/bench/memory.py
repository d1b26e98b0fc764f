"""Compares the memory that `diloco plan` expects for a learner and the syncer with the peaks that the kernel reports.

python -m tests.bench.memory --out recipes/tiny/results/memory.json

1. The runs use the tiny recipe with larger models. With its own small model, Python and its libraries dominate.
2. A learner's memory is counted from the end of its imports, before anything is created; the syncer's is counted from
   the moment it listens.
3. Control: the forecast for the smallest model must be wrong for the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_diloco.cli import run as cli_run
from lightning_diloco.cli.local.display import Screen
from lightning_diloco.cli.local.feed import Status
from lightning_diloco.cli.local.fleet import Fleet
from lightning_diloco.cli.local.interruption import Interruption
from lightning_diloco.cli.local.run import Plan, execute
from lightning_diloco.cli.plan import scenario_of
from lightning_diloco.hf.blueprint import blueprint
from lightning_diloco.hf.recipe import parse
from lightning_diloco.planner.plan import Forecast, forecast
from tests.bench import report
from tests.bench.tiny import RECIPE
from tests.resident import resident_at_most, resident_now

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.15
NUM_LEARNERS = 2
SYNCER = "syncer"
LAYERS = {"intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
HIDDEN_SIZES = (320, 640)
OVERRIDES = (
    "--trainer.max_steps=48",
    "--trainer.val_check_interval=24",
    "--trainer.limit_val_batches=2",
    "--data.init_args.batch_size=1",
)


def overrides_of(hidden_size: int) -> list[str]:
    """Return overrides of the recipe for a model of this width."""
    config = {"model_type": "llama", "hidden_size": hidden_size, **LAYERS, "tie_word_embeddings": True}
    return [*OVERRIDES, f"--model.init_args.config={json.dumps(config)}"]


class Onlooker:
    """Reads the peak memory of each process while they train.

    Attributes:
        peaks: peak bytes by process.
        before: bytes of the syncer when it began to listen.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.before: int | None = None

    def __call__(self, fleet: Fleet, status: Status | None) -> None:
        for name in (SYNCER, *(f"l{k}" for k in range(NUM_LEARNERS))):
            with contextlib.suppress(OSError, ValueError):  # the process has ended
                pid = fleet.pid(name)
                if name == SYNCER and self.before is None:
                    self.before = resident_now(pid)
                self.peaks[name] = max(self.peaks.get(name, 0), resident_at_most(pid))


def run(hidden_size: int) -> tuple[int, int]:
    """Return the bytes of the larger of two learners, and of the syncer."""
    with tempfile.TemporaryDirectory(prefix="diloco-memory-") as name, contextlib.ExitStack() as stack:
        run_dir, onlooker = Path(name), Onlooker()
        module = (sys.executable, "-m", "tests.bench.memory_learner", "--local", str(NUM_LEARNERS))
        plan = Plan(
            run_dir=run_dir,
            syncer_argv=cli_run.syncer_argv(run_dir, NUM_LEARNERS),
            learner_argv=(*module, str(RECIPE), *overrides_of(hidden_size)),
            num_learners=NUM_LEARNERS,
            threads=1,
            max_restarts=0,
        )
        screen = stack.enter_context(Screen(Console(), live=False, period_s=30.0))
        ended = execute(plan, screen, stack.enter_context(Interruption()), meddle=onlooker)
        if ended.exit_code:
            raise RuntimeError(f"the run failed:\n{(run_dir / 'learners' / 'l0' / 'log.txt').read_text()[-4000:]}")
        before = {k: int((run_dir / "learners" / k / "before").read_text()) for k in plan.learners}
        assert onlooker.before is not None, "the syncer was there before the learners"
        return (
            max(onlooker.peaks[k] - before[k] for k in plan.learners),
            onlooker.peaks[SYNCER] - onlooker.before,
        )


@cache
def forecast_of(hidden_size: int) -> Forecast:
    """Return the forecast for a model of this width."""
    return forecast(scenario_of(blueprint(parse(RECIPE, overrides_of(hidden_size))), {"learners": NUM_LEARNERS}))


def learner_bytes(found: Forecast) -> int:
    """Return the expected bytes of a learner on a CPU, where device and host share memory."""
    return sum(found.device.values()) + sum(found.host.values())


def syncer_bytes(found: Forecast) -> int:
    """Return the expected bytes of the syncer."""
    return sum(found.syncer.values())


def size_of(found: Forecast) -> str:
    """Return the size of the model in words."""
    return f"{found.scenario.training.num_parameters / 1e6:.1f}M parameters"


def gaps_of(found: Forecast, learner: int, syncer: int) -> dict[str, float]:
    """Return the relative errors of the forecast."""
    return {"a learner": learner_bytes(found) / learner - 1, "the syncer": syncer_bytes(found) / syncer - 1}


def row_of(found: Forecast, learner: int, syncer: int) -> dict[str, Any]:
    """Return the table row of one run."""
    planned = {"learner": (learner_bytes(found), learner), "syncer": (syncer_bytes(found), syncer)}
    row: dict[str, Any] = {"run": size_of(found)}
    for who, (expected, measured) in planned.items():
        row |= {
            f"{who}, planned [MB]": round(expected / 1e6),
            f"{who}, measured [MB]": round(measured / 1e6),
            f"{who} off by": f"{expected / measured - 1:+.1%}",
        }
    return row


def checks_of(measured: dict[int, tuple[int, int]]) -> dict[str, bool]:
    """Return the checks."""
    checks = {}
    for hidden_size, (learner, syncer) in measured.items():
        found = forecast_of(hidden_size)
        for who, gap in gaps_of(found, learner, syncer).items():
            checks[f"{size_of(found)}: {who} is off by {gap:+.1%}, at most {TOLERANCE:.0%}"] = abs(gap) <= TOLERANCE
    (small, *_, large) = measured
    for who, gap in gaps_of(forecast_of(small), *measured[large]).items():
        checks[f"control: as if the model were the smallest, {who} is off by {gap:+.1%}"] = abs(gap) > TOLERANCE
    return checks


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Run, print and store; return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-sizes", nargs="+", type=int, default=HIDDEN_SIZES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = str(ROOT)  # for the learners
    measured = {hidden_size: run(hidden_size) for hidden_size in args.hidden_sizes}
    rows = [row_of(forecast_of(hidden_size), *both) for hidden_size, both in measured.items()]
    checks = checks_of(measured)
    say(report.table(rows))
    say("\n" + report.verdicts(checks))
    seen = {**report.circumstances(), "command": "python -m tests.bench.memory"}
    report.store(args.out, {"circumstances": seen, "rows": rows, "checks": checks})
    return int(not all(checks.values()))


if __name__ == "__main__":
    raise SystemExit(main())
