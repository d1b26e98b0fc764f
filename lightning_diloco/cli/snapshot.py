"""`diloco snapshot`: takes a consistent snapshot of a run while it trains, for `diloco run --from`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.errors import ConfigError, TransportError

_EXAMPLE = """examples:
  diloco snapshot runs/mine --to snapshots/monday
  diloco run recipes/tiny/gpt.yaml --local 2 --from snapshots/monday"""
_TRAINING = ("stepping", "evaluating", "stalled")


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "take a snapshot of a run while it trains: syncer and learners"
    parser = add_verb(verbs, "snapshot", about, _EXAMPLE)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory; its syncer must be running")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new directory, as secret as RUN_DIR")
    parser.add_argument(
        "--checkpoints", metavar="URL", help="checkpoint store of the learners (default: RUN_DIR/checkpoints)"
    )
    parser.add_argument("--within", type=float, default=60.0, metavar="S", help="seconds to wait for learners (60)")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Take the snapshot and print its contents."""
    from lightning_diloco.cli.local.feed import asking
    from lightning_diloco.storage.checkpoint_store import CheckpointStore
    from lightning_diloco.syncer.run_snapshot import take
    from lightning_diloco.transport.address import read_join_file

    run_dir, to = arguments.run_dir.resolve(), arguments.to.resolve()
    address = read_join_file(run_dir / "join")
    store = CheckpointStore(
        f"{arguments.checkpoints.rstrip('/')}/{address.run}" if arguments.checkpoints else str(run_dir / "checkpoints")
    )
    with asking(address) as fetch:
        try:
            fetch()
        except TransportError as error:
            raise ConfigError(
                f"the syncer of {run_dir} does not answer; a snapshot needs a running syncer. Start the run "
                "again with its `diloco run` command; the model of a finished run comes from `diloco export`"
            ) from error

        def stepping() -> Iterable[str]:
            return [learner["id"] for learner in fetch()["learners"] if learner["phase"] in _TRAINING]

        found = take(run_dir, to, store, stepping, within_s=arguments.within)
    print(f"snapshot of run {found.run} in {to}")
    print(f"anchors: versions {min(found.versions)}..{max(found.versions)}, the log up to record {found.lsn}")
    print(f"checkpoints: {json.dumps(found.steps)} (steps by learner)")
    pending = f"{found.tokens_pending} pending (a run that begins from this snapshot discards them, as lapsed)"
    print(f"ledger: {found.tokens_merged} token-fragments merged, {pending}, exact")
    return 0
