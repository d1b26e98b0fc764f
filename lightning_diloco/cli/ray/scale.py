"""`diloco scale`: changes the number of learners of a running `diloco run --engine ray`.

The verb writes the number into the run directory, and `diloco run` follows it. A learner that is removed leaves in good
order: its work is merged, and it writes a checkpoint from which it goes on if it is added again.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_diloco.cli.local.claim import is_claimed
from lightning_diloco.cli.ray.files import Desk, Wanted
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.errors import ConfigError

_EXAMPLE = "example:\n  diloco scale /shared/mine 6"
_WITHIN_S, _POLL_S = 60.0, 0.1


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "add or remove learners of a running `diloco run --engine ray`"
    parser = add_verb(verbs, "scale", about, _EXAMPLE)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    parser.add_argument("learners", type=int, metavar="N", help="number of learners from now on")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Change the number, and wait until the run has applied it."""
    run_dir, num_learners = arguments.run_dir, arguments.learners
    if num_learners < 1:
        raise ConfigError(
            f"{num_learners} learners: a run needs at least 1; to end it, press Ctrl-C at its `diloco run`"
        )
    wanted = Wanted(run_dir)
    if (wants := wanted.read()) is None or not is_claimed(run_dir):
        raise ConfigError(f"no `diloco run --engine ray` runs in {run_dir}; see `diloco status {run_dir}`")
    wants.authenticate()
    if num_learners > wants.num_learners:
        from lightning_diloco.cli.ray.cluster import check_room, connected

        with connected(wants.address):
            check_room(wants.needs, num_learners, wants.num_hosts)
    wanted.write(replace(wants, num_learners=num_learners))
    deadline_s = time.monotonic() + _WITHIN_S
    while not _is_ordered(run_dir, num_learners):
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"{run_dir}: the new number was not applied within {_WITHIN_S:g} s; see the output of `diloco run`"
            )
        time.sleep(_POLL_S)
    print(f"{run_dir}: {num_learners} learner(s) from now on; before: {wants.num_learners}")
    return 0


def _is_ordered(run_dir: Path, num_learners: int) -> bool:
    """Return whether exactly the wanted learners have the order to run."""
    orders = {name: Desk(run_dir, name).order() for name in Desk.names(run_dir) if name.startswith("l")}
    running = {name for name, order in orders.items() if order is not None and order.wish == "run"}
    return running == {f"l{k}" for k in range(num_learners)}
