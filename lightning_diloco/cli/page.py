"""The live page of a run, for the verbs that serve it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_diloco.cli.local.feed import StatusFeed
    from lightning_diloco.live.watch import Watch

LISTEN = "127.0.0.1:0"
HELP = f"address of the live page (default: {LISTEN}, any free port); uses TLS and a token unless on loopback"
_LINGER_S = 1.5
_TICK_S = 0.25


@contextmanager
def served(run_dir: Path, listen: str, say: Callable[[str], None]) -> Iterator[Watch]:
    """Serve the live page during the block. The page shows what the block passes to the `Watch`.

    Args:
        run_dir: run directory, whose tape provides the history; it need not exist.
        listen: host:port.
        say: called with the link.
    """
    from lightning_diloco.cli.ray.files import places
    from lightning_diloco.live.server import PageServer
    from lightning_diloco.live.watch import Watch

    watch = Watch(run_dir.name, places=partial(places, run_dir))
    watch.read_past(run_dir)
    with TemporaryDirectory() as elsewhere:
        own = run_dir / "syncer"
        identity_dir = own if own.is_dir() else Path(elsewhere)
        with PageServer(watch, listen, identity_dir=identity_dir, linger_s=_LINGER_S) as server:
            say(f"live page: {server.url}  (metrics for Prometheus: /metrics)")
            yield watch


def follow(watch: Watch, feed: StatusFeed, finished: Callable[[], dict[str, Any] | None]) -> None:
    """Keep the page up to date until an interrupt, also after the end of the run."""
    while True:
        if (summary := finished()) is not None:
            watch.ended(summary)
        elif feed.latest is not None or feed.problem is not None:
            watch.saw(feed.latest, feed.problem)
        time.sleep(_TICK_S)
