"""The syncer process: a service behind a Flight server, from its start to the end of the run.

1. The first start in a run directory creates run id, token and certificate. Later starts keep them, so that learners
   find and trust a restarted syncer.
2. A restarted syncer listens before it reads its disk, and reports its progress. If its standby lacks the end of its
   log, it waits for the standby before it serves.
3. The syncer refuses a run directory that has lost files of a run that learners may know, unless `reseed` is set.
4. A standby follows its primary first. After a takeover it serves the run, and tells the former primary, which then
   becomes its standby.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import threading
import time
from dataclasses import dataclass, replace

from lightning_diloco.errors import ConfigError, RemoteError, TransportError
from lightning_diloco.process import descriptors, grpc_log
from lightning_diloco.process.malloc import keep_few_heaps
from lightning_diloco.storage import local_runs
from lightning_diloco.syncer.front import Front
from lightning_diloco.syncer.restoring import RestoringHandler
from lightning_diloco.syncer.service import SyncerOptions, SyncerService
from lightning_diloco.syncer.standby.follower import Follower, become_primary, become_standby, primary_of
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.syncer.standby.replica import forget_standby
from lightning_diloco.syncer.standby.source import Source, copy_identity, must_copy
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

LOOK_S = 0.1
REACH_S = 60.0
AGAIN_S = 2.0


def serve(options: SyncerOptions) -> int:
    """Serve a run until it is over, or until SIGTERM or SIGINT; return the exit code."""
    keep_few_heaps()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    descriptors.allow_all()
    grpc_log.keep_to_errors()
    options.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    primary = _first_primary(options)
    while True:
        opened = _opened(options) if primary is None else _followed(options, primary, stop)
        if opened is None:
            return 0
        primary = _serve(opened, options, stop)
        if primary is None:
            return 0
        options = replace(options, listen=opened.front.listens_on)
        del opened  # its anchors are as large as those of the standby


@dataclass(slots=True)
class _Opened:
    """A service that is ready to start, and its front.

    Args:
        own: address of this syncer; None: it does not listen yet.
        former: the primary before a takeover by this process; None: there was none.
    """

    service: SyncerService
    door: RestoringHandler
    front: Front
    identity: ServerIdentity
    own: JoinAddress | None
    former: Invitation | None = None


def _first_primary(options: SyncerOptions) -> Invitation | None:
    """Return the primary that this process is the standby of; None if this process is the primary."""
    if options.takes_over:
        become_primary(options.run_dir)
        forget_standby(options.run_dir)
    primary = primary_of(options.run_dir)
    if primary is not None or options.standby_of is None:
        return primary
    if (options.run_dir / "join").exists():
        log.info("%s has taken over its run before, and serves it", options.run_dir)
        return None
    return options.standby_of


def _opened(options: SyncerOptions) -> _Opened:
    """Open a run directory as the primary."""
    address, identity = _address_and_identity(options)
    door = RestoringHandler()
    front = Front(door, options.run_dir, options.listen, address, identity)
    own: list[JoinAddress] = []

    def listen() -> None:
        own.append(_listen(front, options, identity))

    is_known = (options.run_dir / "join").exists()
    try:
        # In a known run, listen first, so that learners get the progress. A new run has nothing to restore.
        durable = SyncerStore(options.run_dir, locked=listen if is_known else lambda: None, tell=door.tell)
        key = Invitation.of(address, identity).key
        service = SyncerService(options, run=address.run, durable=durable, standby_key=key)
    except BaseException:
        front.stop()
        raise
    return _Opened(service, door, front, identity, own[0] if own else None)


def _followed(options: SyncerOptions, primary: Invitation, stop: threading.Event) -> _Opened | None:
    """Be a standby; return the service of a run that this process has taken over, None at the end."""
    with contextlib.ExitStack() as undo:
        source, door = Source(primary), RestoringHandler()
        undo.callback(source.close)
        _reach(source, options)
        become_standby(options.run_dir, primary)
        identity = ServerIdentity.load_or_create(options.run_dir / "syncer")
        address = replace(primary.address, standby=primary.address.host_port)
        front = Front(door, options.run_dir, options.listen, address, identity)
        undo.callback(front.stop)
        own = _listen(front, options, identity)
        follower = Follower(options.run_dir, source, own.host_port, stop.is_set)
        door.refused = follower.asked
        log.info("this syncer is the standby of %s", primary.address.host_port)
        if (run := follower.run()) is None:
            return None
        log.warning("the primary at %s is lost; this syncer serves the run now", primary.address.host_port)
        become_primary(options.run_dir)
        followed = run.state, run.store
        service = SyncerService(options, run=own.run, durable=run.durable, followed=followed, standby_key=primary.key)
        undo.pop_all()
    source.close()
    return _Opened(service, door, front, identity, own, former=primary)


def _reach(source: Source, options: SyncerOptions) -> None:
    """Copy the certificate of the run; try for REACH_S."""
    until_s = time.monotonic() + REACH_S
    while True:
        try:
            return copy_identity(source, options.run_dir)
        except TransportError:
            if time.monotonic() > until_s:
                raise
        time.sleep(AGAIN_S)


def _listen(front: Front, options: SyncerOptions, identity: ServerIdentity) -> JoinAddress:
    own = front.listen()
    if options.embedded_by is None:  # otherwise each script would add a link
        local_runs.note(own.run, options.run_dir)
        Invitation.of(replace(own, standby=None), identity).write(options.run_dir)
    log.info("run %s is served at %s; the whole join string is in %s/join", own.run, own, options.run_dir)
    return own


def _serve(opened: _Opened, options: SyncerOptions, stop: threading.Event) -> Invitation | None:
    """Serve a run until its end; return the new primary if the standby has taken over instead."""
    service, door, front = opened.service, opened.door, opened.front
    replica, own = service.replica, opened.own
    door.refused, door.standby = service.heard, replica.on_get
    try:
        if replica.is_behind:
            door.tell(f"waiting for its standby at {replica.address}")
            log.warning(
                "waiting for the standby at %s, which may have taken over. If it is lost: diloco syncer --run-dir %s "
                "--take-over",
                replica.address,
                options.run_dir,
            )
        while replica.is_behind and not stop.is_set():
            stop.wait(LOOK_S)
        if replica.successor is None:
            service.start()
            door.open(service)
        own = own or _listen(front, options, opened.identity)
        if opened.former is not None:
            telling = threading.Thread(target=_tell, args=(opened.former, own, service, stop), daemon=True)
            telling.start()
        while not stop.is_set() and replica.successor is None and not service.wait(LOOK_S):
            front.follow_rotation()
            front.name_standby(replica.address)
    finally:
        if replica.successor is None:
            summary = service.stop()
        else:
            door.close()
            service.abandon()
        front.stop()
    if service.error is not None:
        raise service.error
    if replica.successor is None:
        log.info("the run ended: %s", summary["status"])
        return None
    host, port = split_host_port(replica.successor)
    log.warning("the standby at %s has taken over; this syncer becomes its standby", replica.successor)
    must_copy(options.run_dir)
    key = Invitation.of(own, opened.identity).key
    return Invitation(replace(own, host=host, port=port, standby=None), key)


def _tell(former: Invitation, own: JoinAddress, service: SyncerService, stop: threading.Event) -> None:
    """Tell the former primary of the takeover, again and again until this run has a standby.

    A former primary that was told may be killed before it has noted it.
    """
    source = Source(former)
    while not stop.is_set() and service.replica.address is None:
        try:
            source.took_over(own.host_port)
        except TransportError:  # it is away, or a standby already
            pass
        except RemoteError as error:
            log.warning("the former primary was not told of the takeover: %s", error)
            break
        stop.wait(AGAIN_S)
    source.close()


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
