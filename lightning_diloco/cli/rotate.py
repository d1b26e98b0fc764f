"""`diloco rotate`: replaces the token of a run while it trains. The syncer then refuses the old token."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.errors import TransportError

_EXAMPLE = "example:\n  diloco rotate runs/mine"
_WITHIN_S = 15.0
_AGAIN_S = 0.2


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "give a run another token; the old one is refused from then on"
    detail = (
        ". Learners that can read RUN_DIR/join use the new one by themselves; others train on, but are refused until "
        "they are started again with DILOCO_JOIN=$(cat RUN_DIR/join)"
    )
    parser = add_verb(verbs, "rotate", about, _EXAMPLE, detail=detail)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory, on this machine")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Replace the token, and wait until a running syncer accepts the new one."""
    from lightning_diloco.cli.local.feed import answers
    from lightning_diloco.learner.rotation import rotate
    from lightning_diloco.transport.address import read_join_file

    join = arguments.run_dir / "join"
    is_served = answers(read_join_file(join))
    rotate(arguments.run_dir)
    until_s = time.monotonic() + _WITHIN_S
    while is_served and not answers(address := read_join_file(join)):
        if time.monotonic() > until_s:
            raise TransportError(
                f"the syncer at {address.host_port} has not taken the new token in {_WITHIN_S:.0f} s; it must see "
                f"{join} change; start it again: it reads that file"
            )
        time.sleep(_AGAIN_S)
    taken = "the syncer has taken it" if is_served else "no syncer is running; the next one takes it"
    print(f"{join} has a new token, and {taken}; others join with DILOCO_JOIN=$(cat {join})")
    return 0
