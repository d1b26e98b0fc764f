"""Compares the memory that `diloco plan` expects for a learner and the syncer with the peaks that the kernel reports.

python -m tests.bench.memory --out recipes/tiny/results/memory.json

1. The runs use the tiny recipe with larger models. With its own small model, Python and its libraries dominate.
2. A learner's memory is counted from the end of its imports, before anything is created; the syncer's is counted from
   the moment it listens.
3. Control: the forecast for the smallest model must be wrong for the largest.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lightning_diloco.cli.local.feed import Status
from lightning_diloco.cli.local.fleet import Fleet
from lightning_diloco.cli.plan import scenario_of
from lightning_diloco.hf.blueprint import blueprint
from lightning_diloco.hf.recipe import parse
from lightning_diloco.planner.plan import Forecast, forecast
from tests.bench import local_run, report
from tests.bench.tiny import RECIPE
from tests.resident import resident_at_most, resident_now

TOLERANCE = 0.15
SYNCER, LEARNERS = "syncer", ("l0", "l1")
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
        for name in (SYNCER, *LEARNERS):
            with contextlib.suppress(OSError, ValueError):  # the process has ended
                pid = fleet.pid(name)
                if name == SYNCER and self.before is None:
                    self.before = resident_now(pid)
                self.peaks[name] = max(self.peaks.get(name, 0), resident_at_most(pid))


def run(hidden_size: int) -> tuple[int, int]:
    """Return the bytes of the larger of two learners, and of the syncer."""
    with tempfile.TemporaryDirectory(prefix="diloco-memory-") as name:
        run_dir, onlooker = Path(name), Onlooker()
        module = ("tests.bench.memory_learner", "--local", len(LEARNERS))
        ended = local_run.run(run_dir, (*module, RECIPE, *overrides_of(hidden_size)), len(LEARNERS), onlooker)
        if ended.exit_code:
            raise RuntimeError(f"the run failed:\n{(run_dir / 'learners' / 'l0' / 'log.txt').read_text()[-4000:]}")
        before = {k: int((run_dir / "learners" / k / "before").read_text()) for k in LEARNERS}
        assert onlooker.before is not None, "the syncer was there before the learners"
        return (
            max(onlooker.peaks[k] - before[k] for k in LEARNERS),
            onlooker.peaks[SYNCER] - onlooker.before,
        )


@cache
def forecast_of(hidden_size: int) -> Forecast:
    """Return the forecast for a model of this width."""
    return forecast(scenario_of(blueprint(parse(RECIPE, overrides_of(hidden_size))), {"num_learners": len(LEARNERS)}))


def planned_of(found: Forecast) -> tuple[int, int]:
    """Return the expected bytes of a learner on a CPU, where device and host share memory, and of the syncer."""
    return sum(found.device.values()) + sum(found.host.values()), sum(found.syncer.values())


def size_of(found: Forecast) -> str:
    """Return the size of the model in words."""
    return f"{found.scenario.training.num_parameters / 1e6:.1f}M parameters"


def gaps_of(found: Forecast, measured: tuple[int, int]) -> dict[str, float]:
    """Return the relative errors of the forecast."""
    gaps = (expected / seen - 1 for expected, seen in zip(planned_of(found), measured, strict=True))
    return dict(zip(("a learner", "the syncer"), gaps, strict=True))


def row_of(found: Forecast, measured: tuple[int, int]) -> dict[str, Any]:
    """Return the table row of one run."""
    row: dict[str, Any] = {"run": size_of(found)}
    for who, expected, seen in zip(("learner", SYNCER), planned_of(found), measured, strict=True):
        row |= {
            f"{who}, planned [MB]": round(expected / 1e6),
            f"{who}, measured [MB]": round(seen / 1e6),
            f"{who} off by": f"{expected / seen - 1:+.1%}",
        }
    return row


def checks_of(measured: dict[int, tuple[int, int]]) -> dict[str, bool]:
    """Return the checks."""
    checks = {}
    for hidden_size, seen in measured.items():
        found = forecast_of(hidden_size)
        for who, gap in gaps_of(found, seen).items():
            checks[f"{size_of(found)}: {who} is off by {gap:+.1%}, at most {TOLERANCE:.0%}"] = abs(gap) <= TOLERANCE
    (small, *_, large) = measured
    for who, gap in gaps_of(forecast_of(small), measured[large]).items():
        checks[f"control: as if the model were the smallest, {who} is off by {gap:+.1%}"] = abs(gap) > TOLERANCE
    return checks


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and store; return 1 if a bound is missed."""
    parser = report.options(__doc__)
    parser.add_argument("--hidden-sizes", nargs="+", type=int, default=HIDDEN_SIZES)
    args = parser.parse_args(argv)
    measured = {hidden_size: run(hidden_size) for hidden_size in args.hidden_sizes}
    rows = [row_of(forecast_of(hidden_size), both) for hidden_size, both in measured.items()]
    return report.conclude(args.out, rows, checks_of(measured), command="python -m tests.bench.memory")


if __name__ == "__main__":
    raise SystemExit(main())
