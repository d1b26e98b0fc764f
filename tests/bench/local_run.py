"""A run on this machine, as `diloco run` makes it, with a function that observes or disturbs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from lightning_diloco.cli.local.display import Screen
from lightning_diloco.cli.local.interruption import Interruption
from lightning_diloco.cli.local.run import Ended, Meddle, Plan, execute
from lightning_diloco.cli.run import syncer_argv
from tests.bench.report import ROOT


def run(run_dir: Path, learner: Sequence[object], num_learners: int, meddle: Meddle, **options: Any) -> Ended:
    """Run a syncer and learners of one thread each, until all have finished.

    Args:
        run_dir: run directory.
        learner: module of the learners, and its arguments; it is imported from this checkout.
        num_learners: number of learners.
        meddle: called ten times a second while they train.
        options: arguments of `Plan`; by default, nothing is restarted.
    """
    options = {"syncer_argv": syncer_argv(run_dir, num_learners), "threads": 1, "max_restarts": 0, **options}
    argv = (sys.executable, "-m", *map(str, learner))
    plan = Plan(run_dir=run_dir, learner_argv=argv, num_learners=num_learners, **options)
    with (
        mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)),
        Screen(Console(), live=False, period_s=60.0) as screen,
        Interruption() as interruption,
    ):
        return execute(plan, screen, interruption, meddle=meddle)
