"""`diloco chaos`: runs a recipe with N learners on this machine under a seeded schedule of real faults.

The run must end by itself. Exit code 0 means that every learner and the run finished, that the ledger is exact, and
that `diloco replay` reproduces the run from the recorded contributions. With `--compare`, the recipe then runs without
faults to the same number of merged tokens, to compare the loss. The learning rate follows the same schedule in both
runs: with a duration it keeps the recipe's length, otherwise it has the length of the run.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_diloco.cli import recipes, run
from lightning_diloco.cli.faults.schedule import KINDS, WITHOUT_SHARDS, Kind, draw
from lightning_diloco.cli.local.claim import claimed
from lightning_diloco.cli.text.quantities import seconds
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_diloco.cli.faults.injector import FaultInjector
    from lightning_diloco.cli.local.run import Ended, Plan, Via

_EXAMPLE = """examples:
  diloco chaos recipes/tiny/gpt.yaml --local 4 --faults-per-hour 85 --duration 20m
  diloco chaos recipes/tiny/gpt.yaml --local 2 --faults-per-hour 240 --kinds kill,cut --trainer.max_steps 400"""
_VALUED = (*run.VALUED, "--faults-per-hour", "--kinds", "--shards", "--seed", "--duration")
_FLAGS = ("--compare", "--no-table", "-h", "--help")
_OF_A_RUN = ("chaos", "syncer", "summary.json")
_CLOCK = "lightning_diloco.cli.faults.step_log.StepClock"

split = partial(run.split, valued=_VALUED, flags=_FLAGS)


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "run a recipe under a seeded schedule of real faults, and write a report"
    parser = add_verb(
        verbs,
        "chaos",
        about,
        _EXAMPLE,
        detail=": RUN_DIR/chaos.json and chaos.png",
        usage="diloco chaos RECIPE.yaml|SCRIPT.py --local N --faults-per-hour F [options] [--] [overrides]",
    )
    parser.add_argument("target", metavar="RECIPE|SCRIPT", help="a YAML recipe (see `diloco ls`) or a Python script")
    parser.add_argument("--local", type=int, metavar="N", help="number of learners")
    parser.add_argument("--faults-per-hour", type=float, metavar="F", help="total over all kinds and targets")
    kinds = f"of {','.join(KINDS)} (default: all; shard only with --shards)"
    parser.add_argument("--kinds", metavar="K,..", help=kinds)
    parser.add_argument("--shards", type=int, metavar="S", help=run.SHARDS)
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the schedule (default: 0)")
    parser.add_argument("--duration", metavar="T", help="end the run after this time at the latest, such as 20m")
    parser.add_argument("--compare", action="store_true", help="then run without faults to the same merged tokens")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="a new folder; default: runs/chaos-<name>-<time>")
    parser.add_argument("--max-restarts", type=int, default=200, metavar="R", help="per process (default: 200)")
    parser.add_argument("--threads", type=int, metavar="T", help="threads per learner (default: cores / N)")
    parser.add_argument("--no-table", action="store_true", help="print plain lines even on a terminal")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Run to the end and write the report; returns the exit code."""
    asked = _check(arguments)
    target = recipes.resolve(arguments.target)
    if target.suffix == ".py" and (asked.duration_s is not None or arguments.compare):
        raise ConfigError(f"{target}: --duration and --compare need a YAML recipe; pass a script's options after --")
    run_dir = run.make_run_dir(arguments.run_dir, f"chaos-{target.stem}")
    if taken := [name for name in _OF_A_RUN if (run_dir / name).exists()]:
        raise ConfigError(f"{run_dir} holds {', '.join(taken)} of a run; choose a new folder with --run-dir")
    with claimed(run_dir):
        return _run(arguments, asked, target, run_dir)


def _run(arguments: argparse.Namespace, asked: _Asked, target: Path, run_dir: Path) -> int:
    from rich.console import Console

    from lightning_diloco.cli.faults import report as chaos_report
    from lightning_diloco.cli.faults import story as chaos_story
    from lightning_diloco.cli.faults.injector import FaultInjector

    console = Console()
    chance = {"faults_per_hour": arguments.faults_per_hour, "seed": arguments.seed}
    faults = draw(asked.kinds, _names(arguments), num_shards=arguments.shards or 1, **chance)
    passed_on = arguments.passed_on if target.suffix == ".py" else [*asked.overrides(), *arguments.passed_on]
    with FaultInjector(faults, run_dir / chaos_story.FAULTS) as meddler:
        plan = _plan(arguments, run_dir, run.learner_argv(target, passed_on, arguments.local), via=meddler.via)
        ended = _execute(plan, console, arguments, meddler)
    story = chaos_story.read(run_dir)
    report = {"exit_code": ended.exit_code, "seed": arguments.seed, **chaos_report.measure(story), **_replayed(run_dir)}
    if arguments.compare and ended.exit_code == 0:
        num_steps = chaos_report.steps_to_compare(story, arguments.local)
        argv = run.learner_argv(target, [*arguments.passed_on, *asked.calm_overrides(num_steps)], arguments.local)
        calm = _execute(_plan(arguments, run.make_run_dir(run_dir / "calm", ""), argv), console, arguments)
        report.update(chaos_report.compared(report, calm.summary or {}))
    (run_dir / "chaos.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(chaos_report.view(report, run_dir))
    _draw(story, run_dir, console)
    failures = chaos_report.failures(report)
    for failure in failures:
        console.print(failure, style="bold red", highlight=False, markup=False, soft_wrap=True)
    return ended.exit_code or int(bool(failures))


@dataclass(frozen=True, slots=True)
class _Asked:
    kinds: tuple[Kind, ...]
    duration_s: float | None

    def overrides(self) -> list[str]:
        """Return the options that precede the user's own; with a duration, they include its absolute end."""
        clock = [f"--trainer.callbacks+={_CLOCK}"]
        if self.duration_s is None:
            return clock
        until = f"--trainer.callbacks.until_s={time.time() + self.duration_s:.3f}"
        return [*clock, until]

    def calm_overrides(self, num_steps: int) -> list[str]:
        """Return the options that follow the user's own in the run without faults, and end it after `num_steps`."""
        if self.duration_s is None:
            return [f"--trainer.max_steps={num_steps}"]
        return [f"--trainer.callbacks+={_CLOCK}", f"--trainer.callbacks.until_step={num_steps}"]


def _check(arguments: argparse.Namespace) -> _Asked:
    problems = run.problems(arguments)
    if arguments.faults_per_hour is None:
        problems.append("--faults-per-hour F is missing: pass the number of faults per hour, for example 60")
    elif not 0.0 < arguments.faults_per_hour < float("inf"):
        problems.append(f"--faults-per-hour {arguments.faults_per_hour}: must be above 0")
    has_shards = arguments.shards is not None and arguments.shards > 1
    words = arguments.kinds.split(",") if arguments.kinds else KINDS if has_shards else WITHOUT_SHARDS
    unknown = [word for word in words if word not in KINDS]
    twice = sorted({word for word in words if words.count(word) > 1})
    if unknown or twice:
        found = f"found {unknown}" if unknown else f"{', '.join(twice)} is given more than once"
        problems.append(f"--kinds {arguments.kinds}: {found}; allowed: {', '.join(KINDS)}, each once")
    if "shard" in words and not has_shards:
        problems.append("--kinds shard: the run has one shard, which is the syncer; add --shards 2, or more")
    duration_s = None
    try:
        duration_s = seconds(arguments.duration) if arguments.duration else None
    except argparse.ArgumentTypeError as error:
        problems.append(f"--duration {error}")
    if problems:
        raise ConfigError(problems)
    return _Asked(tuple(kind for kind in KINDS if kind in words), duration_s)


def _names(arguments: argparse.Namespace) -> list[str]:
    return [f"l{index}" for index in range(arguments.local)]


def _plan(arguments: argparse.Namespace, run_dir: Path, learner_argv: tuple[str, ...], via: Via | None = None) -> Plan:
    from lightning_diloco.cli.local.run import Plan

    return Plan(
        run_dir=run_dir,
        syncer_argv=(*run.syncer_argv(run_dir, arguments.local, arguments.shards), "--record", "contributions"),
        learner_argv=learner_argv,
        num_learners=arguments.local,
        threads=arguments.threads,
        max_restarts=arguments.max_restarts,
        via=via,
    )


def _execute(
    plan: Plan, console: Console, arguments: argparse.Namespace, meddler: FaultInjector | None = None
) -> Ended:
    from lightning_diloco.cli.local.display import Screen
    from lightning_diloco.cli.local.interruption import Interruption
    from lightning_diloco.cli.local.run import execute

    with Interruption() as interruption, Screen(console, live=console.is_terminal and not arguments.no_table) as screen:
        screen.say(f"run directory: {plan.run_dir}  (each process logs to log.txt in its folder there)")
        return execute(plan, screen, interruption, meddle=meddler)


def _replayed(run_dir: Path) -> dict[str, str | None]:
    """Return the level at which a replay reproduces the run, or the error if it does not."""
    from lightning_diloco.syncer.replay import replay

    try:
        return {"replayed": replay(run_dir).level, "replay_error": None}
    except StorageError as error:
        return {"replayed": None, "replay_error": str(error)}


def _draw(story: Any, run_dir: Path, console: Console) -> None:
    """Draw the run; a missing matplotlib does not fail the run."""
    from lightning_diloco.cli.faults import picture

    try:
        picture.draw(story, run_dir / "chaos.png", title=f"{run_dir.name}: {len(story.faults)} faults")
    except ConfigError as error:
        console.print(str(error))
