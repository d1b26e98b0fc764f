"""`diloco status`: shows the learners of a run, and the learners that its rounds wait for.

The target is a run directory (with its join file), a join string, or HOST:PORT with the token from --join or
DILOCO_JOIN. If the summary in a run directory is newer than the join file, the run is finished.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_diloco.cli import page
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.errors import ConfigError, RemoteError, TransportError
from lightning_diloco.storage.local_runs import last_summary

if TYPE_CHECKING:
    from lightning_diloco.cli.local.feed import Fetch, Status
    from lightning_diloco.transport.address import JoinAddress

_EXAMPLE = "examples:\n  diloco status runs/mine --watch\n  diloco status runs/mine --serve"
_WATCH_S = 1.0
_QUIET_S, PATIENCE_S = 3.0, 60.0


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "show the learners and rounds of a run, and each wait: for whom, since when, until when, and what follows"
    parser = add_verb(verbs, "status", about, _EXAMPLE)
    parser.add_argument("target", metavar="DIR|HOST:PORT|diloco://...", help="run directory, address or join string")
    parser.add_argument(
        "--join", metavar="JOIN", help="join string or file with the token for HOST:PORT (default: DILOCO_JOIN)"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON that the syncer sent")
    parser.add_argument("--watch", action="store_true", help="print again every second until the run is finished")
    parser.add_argument(
        "--serve", nargs="?", const=page.LISTEN, metavar="HOST:PORT", help=f"serve the live page: {page.HELP}"
    )
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Print the state, or the summary of a finished run."""
    from rich.console import Console

    from lightning_diloco.cli.local.display import event_lines, status_view, summary_view
    from lightning_diloco.cli.ray.files import places

    console, run_dir = Console(), Path(arguments.target)
    if arguments.serve is not None:
        return _serve(arguments, run_dir)

    def show_state(status: Status) -> None:
        console.print(status_view(status))
        where = (f"{name}: {place}" for name, place in places(run_dir).items())
        for line in (*where, *event_lines(status)):
            console.print(line, highlight=False, markup=False)

    show = _print_json if arguments.json else show_state
    show_end = _print_json if arguments.json else lambda summary: console.print(summary_view(summary, run_dir))
    if summary := last_summary(run_dir):
        show_end(summary)
        return 0
    join = run_dir / "join" if run_dir.is_dir() else None
    with ExitStack() as open_calls:
        fetch, status = _answered(address(arguments), join, open_calls)
        show(status)
        while arguments.watch and status["state"] != "finished":
            if (status := _next(fetch, run_dir)) is None:
                break
            show(status)
    if arguments.watch and (summary := last_summary(run_dir)):
        show_end(summary)
    return 0


def _answered(where: JoinAddress, join: Path | None, open_calls: ExitStack) -> tuple[Fetch, Status]:
    """Return the state of the run, and the function that fetches it; from the standby if only that one serves.

    Raises:
        RemoteError: neither of them serves the run.
    """
    from lightning_diloco.cli.local.feed import asking

    fetch = open_calls.enter_context(asking(where, join))
    try:
        return fetch, fetch()
    except TransportError as error:
        if where.standby is None:
            raise
        fetch = open_calls.enter_context(asking(where.swapped(), join))
        try:
            status = fetch()
        except RemoteError as refusal:
            raise TransportError(f"{error}; its standby: {refusal}") from error
    print(f"{where.host_port} does not serve the run; its standby at {where.standby} does", file=sys.stderr)
    return fetch, status


def _next(fetch: Fetch, run_dir: Path) -> Status | None:
    """Return the state of a run a second later; None if the run has finished and its syncer has ended.

    A syncer may be silent for PATIENCE_S: it is restarted, the run gets a new token, or its standby takes over.

    Raises:
        RemoteError: the syncer was silent for a longer time.
    """
    answered_s = time.monotonic()
    while True:
        time.sleep(_WATCH_S)
        try:
            return fetch()
        except RemoteError as error:
            if last_summary(run_dir) is not None:
                return None
            if (silent_s := time.monotonic() - answered_s) > PATIENCE_S:
                raise
            if silent_s > _QUIET_S:
                print(f"no answer for {silent_s:.0f} s: {error}", file=sys.stderr)


def _serve(arguments: argparse.Namespace, run_dir: Path) -> int:
    """Serve the live page until Ctrl-C, also for a finished run."""
    from lightning_diloco.cli.local.feed import StatusFeed, asking

    with page.served(run_dir, arguments.serve, partial(print, flush=True)) as watch:
        if (summary := last_summary(run_dir)) is not None:
            watch.ended(summary)
            threading.Event().wait()
        join = run_dir / "join" if run_dir.is_dir() else None
        with asking(address(arguments), join) as fetch, StatusFeed(fetch, period_s=_WATCH_S) as feed:
            page.follow(watch, feed, partial(last_summary, run_dir))
    return 0


def address(arguments: argparse.Namespace) -> JoinAddress:
    """Return the address of the target's syncer.

    Raises:
        ConfigError: the target is not valid, or there is no token for it.
    """
    from lightning_diloco.transport.address import SCHEME, JoinAddress, address_from, read_join_file, split_host_port

    target: str = arguments.target
    if target.startswith(f"{SCHEME}://"):
        return JoinAddress.parse(target)
    if Path(target).is_dir():
        return read_join_file(Path(target) / "join")
    if ":" not in target:
        raise ConfigError(f"{target!r}: not a folder, HOST:PORT or {SCHEME}://...; give the run directory")
    host, port = split_host_port(target)
    if not (join := arguments.join or os.environ.get("DILOCO_JOIN")):
        raise ConfigError(
            f"{target}: an address needs a token; set DILOCO_JOIN to the join string in RUN_DIR/join, "
            "or pass it with --join"
        )
    known = address_from(join) if arguments.join else JoinAddress.parse(join)
    return known.swapped() if target == known.standby else dataclasses.replace(known, host=host, port=port)


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))
