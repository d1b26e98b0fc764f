"""The syncer process: a service behind a Flight server, from its start to the end of the run.

1. The first start in a run directory creates run id, token and certificate. Later starts keep them, so that learners
   find and trust a restarted syncer.
2. A restarted syncer listens before it reads its disk, and reports its progress.
3. The syncer refuses a run directory that has lost files of a run that learners may know, unless `reseed` is set.
"""

from __future__ import annotations

import logging
import secrets
import signal
import threading

from lightning_diloco.errors import ConfigError
from lightning_diloco.process import descriptors, grpc_log
from lightning_diloco.process.malloc import keep_few_heaps
from lightning_diloco.storage import local_runs
from lightning_diloco.syncer.front import Front
from lightning_diloco.syncer.restoring import RestoringHandler
from lightning_diloco.syncer.service import SyncerOptions, SyncerService
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.address import (
    JoinAddress,
    new_token,
    read_join_file,
    split_host_port,
)
from lightning_diloco.transport.identity import ServerIdentity

__all__ = ["SyncerOptions", "serve"]

log = logging.getLogger(__name__)


def serve(options: SyncerOptions) -> int:
    """Serve a run until it is over, or until SIGTERM or SIGINT; return the exit code."""
    keep_few_heaps()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    descriptors.allow_all()
    grpc_log.keep_to_errors()
    options.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    address, identity = _address_and_identity(options)
    door = RestoringHandler()
    front = Front(door, options.run_dir, options.listen, address, identity)

    def listen() -> None:
        join = front.listen()
        if options.embedded_by is None:  # otherwise each script would add a link
            local_runs.note(join.run, options.run_dir)
        log.info("run %s is served at %s; the whole join string is in %s/join", join.run, join, options.run_dir)

    is_known = (options.run_dir / "join").exists()
    try:
        # In a known run, listen first, so that learners get the progress. A new run has nothing to restore.
        durable = SyncerStore(options.run_dir, locked=listen if is_known else lambda: None, tell=door.tell)
        service = SyncerService(options, run=address.run, durable=durable)
    except BaseException:
        front.stop()
        raise
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    service.start()
    door.open(service)
    try:
        if not is_known:
            listen()
        while not stop.is_set() and not service.wait(0.1):
            front.follow_rotation()
    finally:
        summary = service.stop()
        front.stop()
    log.info("the run ended: %s", summary["status"])
    if service.error is not None:
        raise service.error
    return 0


def _address_and_identity(options: SyncerOptions) -> tuple[JoinAddress, ServerIdentity]:
    """Return run id, token and certificate of a run directory; create them at its first start."""
    host, port = split_host_port(options.listen)
    join, redo_log = options.run_dir / "join", options.run_dir / "syncer" / "log"
    # An interrupted first start leaves an empty log without a join string. No learner knows that run.
    has_records = any(segment.stat().st_size for segment in redo_log.glob("*.log"))
    is_incomplete = not redo_log.exists() if join.exists() else has_records
    if is_incomplete and not options.reseed:
        found, lost = (join, redo_log) if join.exists() else (redo_log, join)
        raise ConfigError(
            f"{found} is there, {lost} is not: this run directory has lost a part of a run that learners know. "
            "Restore it, or start the run again from the learners' checkpoints with --reseed"
        )
    identity = ServerIdentity.load_or_create(options.run_dir / "syncer")
    if join.exists():
        return read_join_file(join), identity
    run = f"{options.run_dir.name[:40] or 'run'}-{secrets.token_hex(3)}"
    return JoinAddress(host, port or 1, _run_id(run), new_token(), identity.fingerprint), identity


def _run_id(text: str) -> str:
    allowed = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in text)
    return allowed.lstrip("._-") or "run"
