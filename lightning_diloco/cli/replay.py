"""`diloco replay`: recomputes a finished run from its log and recorded contributions, and compares bit for bit."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from lightning_diloco.cli.verbs import add_verb

_EXAMPLE = "example:\n  diloco replay runs/mine"


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "recompute a run from its disk and compare bit for bit"
    parser = add_verb(verbs, "replay", about, _EXAMPLE)
    parser.add_argument("run_dir", type=Path, metavar="DIR", help="run directory; its syncer must not be running")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Print the verified parts; a difference raises an error."""
    from lightning_diloco.syncer.replay import replay

    found = replay(arguments.run_dir)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
        return 0
    merges = f"{found.num_merges} merges from received bytes and " if found.level == "merges" else ""
    print(f"verified level: {found.level}")
    total = sum(found.versions)
    steps = f"{found.num_outer_steps} outer steps from the log"
    if found.num_outer_steps < total:
        steps = f"{found.num_outer_steps} of {total} outer steps from the log; the earlier ones are in a snapshot"
    print(f"equal, bit for bit: {merges}{steps}")
    print(f"anchors whose digest was on the tape: {found.num_digests}")
    print(f"versions: {min(found.versions)}..{max(found.versions)} in {len(found.versions)} fragments")
    print(f"ledger: {found.tokens_merged} token-fragments merged" + (", none twice" if merges else ""))
    print("the summary agrees" if found.is_summarized else "there is no summary of this state to compare with")
    if found.level == "outer steps":
        print("merges were not verified: contributions were not recorded from the start (--record contributions)")
    return 0
