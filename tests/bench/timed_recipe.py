"""A learner of a recipe, as `diloco run` starts one, with hooks that are timed from outside.

python -m tests.bench.timed_recipe [--waits FILE] ARGUMENTS     arguments are those of lightning_diloco.cli.fit

1. All calls from a training step into the strategy are wrapped (CALLS). For each inner step, `hooks-<pid>.f64` gets two
   float64 in one write of 16 bytes: unix seconds at its end, and the time of all calls since the previous step. The
   file survives SIGKILL.
2. The learner is otherwise that of the recipe. Another strategy makes none of these calls, and writes no file.
3. `--waits` is the control: no step ends while fewer learners take part than before, unless FILE exists.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning_diloco.cli import fit
from lightning_diloco.cli.faults.step_log import read_steps
from lightning_diloco.learner import link
from lightning_diloco.learner.lease_client import LeaseClient
from lightning_diloco.strategy.hooks import DiLoCoHooks
from lightning_diloco.strategy.recovery.checkpointer import LearnerCheckpointer
from tests.bench.landing_clock import Numbers

PATTERN = "hooks-*.f64"
CALLS: tuple[tuple[type, str], ...] = (
    (DiLoCoHooks, "_note_leased"),
    (LeaseClient, "take"),
    (LearnerCheckpointer, "batch_begins"),
    (link.Link, "settle"),
    (DiLoCoHooks, "_end_inner_step"),
)
LOOK_S = 0.01


class HookClock:
    """Times CALLS; the last of them ends a step.

    Args:
        folder: folder of the file.
    """

    def __init__(self, folder: Path) -> None:
        self._hooks = Numbers(folder, PATTERN)
        self._taken_s = 0.0

    def attach(self) -> None:
        """Wrap all CALLS."""
        for owner, name in CALLS:
            setattr(owner, name, self._timed(getattr(owner, name), ends_step=(owner, name) == CALLS[-1]))

    def _timed(self, call: Callable[..., Any], *, ends_step: bool) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            entered_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._taken_s += time.perf_counter() - entered_s
                if ends_step:
                    self._hooks.append(time.time(), self._taken_s)
                    self._taken_s = 0.0

        return timed


def read_hooks(path: Path) -> list[tuple[float, float]]:
    """Read each step's end and the time of its calls; an incomplete last pair is left out."""
    values = read_steps(path)
    return list(zip(values[::2], values[1::2], strict=False))


def hooks_within(folder: Path, turns: Iterable[tuple[float, float]]) -> list[float]:
    """Return the time of the calls in each step that ended in one of these turns, sorted, from a folder's files."""
    spans = list(turns)
    pairs = [pair for path in folder.glob(PATTERN) for pair in read_hooks(path)]
    return sorted(took_s for at_s, took_s in pairs if any(began_s <= at_s <= ended_s for began_s, ended_s in spans))


def wait_for_peers(unless: Path) -> None:
    """Make links wait at the end of a step while fewer learners take part than before, which they must not do.

    Args:
        unless: a file that ends all waiting.
    """
    step, most = link.Link.step, 1

    def stepped(self: link.Link, *args: Any) -> None:
        nonlocal most
        step(self, *args)
        while (here := self.standing().num_learners or 1) < most and not unless.exists():
            time.sleep(LOOK_S)
        most = max(most, here)

    link.Link.step = stepped  # type: ignore[method-assign]


def main() -> int:
    """Fit the recipe."""
    if sys.argv[1] == "--waits":
        wait_for_peers(unless=Path(sys.argv[2]))
        del sys.argv[1:3]
    HookClock(Path(os.environ["DILOCO_RUN_DIR"]) / "learners" / os.environ["DILOCO_LEARNER"]).attach()
    return fit.main()


if __name__ == "__main__":
    sys.exit(main())
