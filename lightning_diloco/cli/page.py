"""The live page of a run, for the verbs that show one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_diloco.cli.local.feed import StatusFeed
    from lightning_diloco.live.watch import Watch

LISTEN = "127.0.0.1:0"
HELP = f"where the live page is served (default: {LISTEN}, any free port); off loopback with TLS and a token"
_LINGER_S = 1.5
_TICK_S = 0.25


@contextmanager
def served(run_dir: Path, listen: str, say: Callable[[str], None]) -> Iterator[Watch]:
    """Serve the page of a run while the block lasts; what the block tells the `Watch` is what the page shows.

    Args:
        run_dir: its tape is read for what happened before; one that does not exist has no past.
        listen: host:port.
        say: is told the link.
    """
    from lightning_diloco.live.server import PageServer
    from lightning_diloco.live.watch import Watch

    watch = Watch(run_dir.name)
    watch.read_past(run_dir)
    with TemporaryDirectory() as elsewhere:
        own = run_dir / "syncer"
        identity_dir = own if own.is_dir() else Path(elsewhere)
        with PageServer(watch, listen, identity_dir=identity_dir, linger_s=_LINGER_S) as server:
            say(f"live page: {server.url}  (metrics for Prometheus: /metrics)")
            yield watch


def follow(watch: Watch, feed: StatusFeed, finished: Callable[[], dict[str, Any] | None]) -> None:
    """Keep the page up to date until it is interrupted, also beyond the end of the run."""
    while True:
        if (summary := finished()) is not None:
            watch.ended(summary)
        elif feed.latest is not None or feed.problem is not None:
            watch.saw(feed.latest, feed.problem)
        time.sleep(_TICK_S)
