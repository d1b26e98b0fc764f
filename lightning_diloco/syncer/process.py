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
from functools import partial

from lightning_diloco.config import RunConfig
from lightning_diloco.errors import ConfigError, TransportError
from lightning_diloco.process import descriptors, grpc_log
from lightning_diloco.process.exit import let_threads_become_idle
from lightning_diloco.process.malloc import keep_few_heaps
from lightning_diloco.storage import local_runs
from lightning_diloco.storage.files import remove_tree
from lightning_diloco.syncer import replacement
from lightning_diloco.syncer.front import Front
from lightning_diloco.syncer.gated_handler import GatedHandler
from lightning_diloco.syncer.options import SyncerOptions
from lightning_diloco.syncer.service import SyncerService
from lightning_diloco.syncer.shards.layout import holds_run, num_shards_of, tell_token, write_num_shards
from lightning_diloco.syncer.shards.others import OtherShards
from lightning_diloco.syncer.shards.resharding import settle_num_shards
from lightning_diloco.syncer.standby.follower import Follower, become_primary, become_standby, primary_of, taken_from
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.syncer.standby.reign import has_begun, reign
from lightning_diloco.syncer.standby.replica import forget_standby
from lightning_diloco.syncer.standby.source import Source, copy_identity, differs_after, num_shards_at
from lightning_diloco.syncer.standby.telling import Telling
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.address import (
    JoinAddress,
    new_token,
    placed,
    read_join_file,
    split_host_port,
)
from lightning_diloco.transport.identity import ServerIdentity

__all__ = ["SyncerOptions", "serve"]

log = logging.getLogger(__name__)

LOOK_S = 0.1
REACH_S = 60.0
AGAIN_S = 2.0
WARN_S = 30.0


def serve(options: SyncerOptions) -> int:
    """Serve a run until it is over, or until SIGTERM or SIGINT; return the exit code."""
    code = _serve_to_the_end(options)
    let_threads_become_idle()  # threads of calls can crash the interpreter if they end during its shutdown
    return code


def _serve_to_the_end(options: SyncerOptions) -> int:
    keep_few_heaps()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    descriptors.allow_all()
    grpc_log.keep_to_errors()
    RunConfig.from_dict(options.run_options)  # a standby would refuse them only when it takes over
    try:
        options.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {options.run_dir}: {error.strerror}; choose a writable folder") from error
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
        del opened  # another copy of the anchors would need as much memory again


@dataclass(slots=True)
class _Opened:
    """A service that is ready to start, and its front.

    Args:
        is_listening: the front has started.
        telling: tells the former primary of a takeover; None: there was none.
        others: its other shards.
    """

    service: SyncerService
    door: GatedHandler
    front: Front
    identity: ServerIdentity
    is_listening: bool
    telling: Telling | None
    others: OtherShards


def _first_primary(options: SyncerOptions) -> Invitation | None:
    """Return the primary that this process is the standby of; None if this process is the primary.

    Raises:
        ConfigError: the directory does not hold what the options need.
    """
    run_dir, given = options.run_dir, options.standby_of
    if options.takes_over:
        replacement.install(run_dir)
        if not holds_run(run_dir):
            raise ConfigError(f"--take-over: {run_dir} holds no run; give the directory of the syncer that shall serve")
        become_primary(run_dir)
        forget_standby(run_dir)
        return None
    if given is not None:
        given.check(run_dir)
    known = primary_of(run_dir)
    if known is not None:  # if the given one is at the same address, it may have a newer token
        is_same = given is not None and given.address.host_port == known.address.host_port
        return given if is_same else known
    if given is None:
        return None
    if taken_from(run_dir) is not None:
        log.info("%s has already taken over its run, and serves it", run_dir)
        return None
    if (run_dir / "join").exists() and read_join_file(run_dir / "join").host_port == given.address.host_port:
        raise ConfigError(
            f"--run-dir {run_dir} is the directory of the primary at {given.address.host_port}, or a copy of it; "
            "choose an empty one"
        )
    if holds_run(run_dir):
        differs_after(run_dir, 0)  # it was a primary, so its records may differ
    return given


def _opened(options: SyncerOptions) -> _Opened:
    """Open a run directory as the primary."""
    replacement.install(options.run_dir)
    address, identity = _address_and_identity(options)
    num_shards = settle_num_shards(options.run_dir, options.num_shards)
    if num_shards == 1 and options.shards_elsewhere:
        raise ConfigError("--elsewhere: the run has one shard, which is this syncer; add --shards 2, or more")
    door = GatedHandler()
    front = _front(options, door, address, identity)
    is_known = (options.run_dir / "join").exists()
    others = OtherShards()
    try:
        # In a known run, listen first, so that learners get the progress. A new run has nothing to restore.
        locked = partial(_listen, front, options) if is_known else lambda: None
        durable = SyncerStore(options.run_dir, locked=locked, tell=door.tell, num_shards=num_shards)
        key = Invitation.of(address, identity).key
        others.prepare(options, num_shards, front, identity, door)
        service = SyncerService(options, run=address.run, durable=durable, standby_key=key, remote=others.shards)
        former = taken_from(options.run_dir)
        if former is not None and not has_begun(options.run_dir):
            _tell_of_takeover(service, options, front, former)
        telling = None if former is None else Telling(former, front, options.run_dir, durable.log.last_lsn)
    except BaseException:
        front.stop()
        others.stop()
        raise
    return _Opened(service, door, front, identity, is_known, telling, others)


def _followed(options: SyncerOptions, primary: Invitation, stop: threading.Event) -> _Opened | None:
    """Act as a standby; return the service of a run that this process has taken over, None at the end."""
    with contextlib.ExitStack() as undo:
        source, door = Source(primary), GatedHandler()
        undo.callback(source.close)
        replacement.install(options.run_dir)
        num_shards = _reach(source, options, stop)
        if num_shards is None:
            return None
        become_standby(options.run_dir, primary)
        _have_shards(options, num_shards)
        identity = ServerIdentity.load_or_create(options.run_dir / "syncer")
        address = replace(primary.address, standby=primary.address.host_port)
        front = _front(options, door, address, identity)
        undo.callback(front.stop)
        own = front.listen()
        others = OtherShards()
        undo.callback(others.stop)
        others.prepare(options, num_shards, front, identity, door)
        others.start()
        about = {"expect": options.expect, "shards": others.shards}
        follower = Follower(options.run_dir, source, own.host_port, stop.is_set, **about)
        door.refused = follower.asked
        log.info("run %s: this syncer, at %s, is the standby of %s", own.run, own, primary.address.host_port)
        if (run := follower.run()) is None:
            return None
        log.warning("the primary at %s is lost; this syncer serves the run now", primary.address.host_port)
        become_primary(options.run_dir)
        telling = Telling(primary, front, options.run_dir, run.durable.log.last_lsn)
        undo.callback(telling.end)
        door.refused = lambda session: None  # learners wait here from now on
        door.tell("taking over")
        about = {"durable": run.durable, "followed": (run.state, run.store), "remote": others.shards}
        service = SyncerService(options, run=own.run, standby_key=primary.key, **about)
        _tell_of_takeover(service, options, front, primary)
        local_runs.note(own.run, options.run_dir)
        undo.pop_all()
    source.close()
    return _Opened(service, door, front, identity, True, telling, others)


def _tell_of_takeover(service: SyncerService, options: SyncerOptions, front: Front, primary: Invitation) -> None:
    places = {"address": front.address.host_port, "primary": primary.address.host_port}
    service.tell("took over", {**places, "reign": reign(options.run_dir)})


def _have_shards(options: SyncerOptions, num_shards: int) -> None:
    """Give a standby as many shards as the primary has.

    Raises:
        ConfigError: the user asks for another number.
    """
    run_dir = options.run_dir
    if options.num_shards not in (None, num_shards):
        raise ConfigError(
            f"--shards {options.num_shards}: the primary has {num_shards}, and its standby has as many; omit --shards"
        )
    if num_shards_of(run_dir) != num_shards:
        if holds_run(run_dir):
            differs_after(run_dir, 0)
        remove_tree(run_dir / "syncer" / "shards")
        write_num_shards(run_dir / "syncer", num_shards)


def _reach(source: Source, options: SyncerOptions, stop: threading.Event) -> int | None:
    """Copy the certificate of the run; try for REACH_S.

    Returns:
        The number of its shards, as far as it is known if the primary is away; None if the process must stop.
    """
    until_s = time.monotonic() + REACH_S
    while not stop.is_set():
        try:
            copy_identity(source, options.run_dir)
            return num_shards_at(source)
        except TransportError:
            if holds_run(options.run_dir):
                return num_shards_of(options.run_dir)
            if time.monotonic() > until_s:
                raise
        stop.wait(AGAIN_S)
    return None


def _front(options: SyncerOptions, door: GatedHandler, address: JoinAddress, identity: ServerIdentity) -> Front:
    """Make the server of a run. With RUN_DIR/join, it writes RUN_DIR/standby."""

    def invite(own: JoinAddress) -> None:
        num_shards = num_shards_of(options.run_dir)
        for k in range(1, num_shards if not options.shards_elsewhere else 1):
            tell_token(options.run_dir, k, own)
        if options.embedded_by is None:
            Invitation.of(replace(own, standby=None), identity).write(options.run_dir)

    return Front(door, options.run_dir, options.listen, address, identity, written=invite)


def _listen(front: Front, options: SyncerOptions) -> None:
    own = front.listen()
    if options.embedded_by is None:  # otherwise each script would add a link
        local_runs.note(own.run, options.run_dir)
    log.info("run %s is served at %s; the whole join string is in %s/join", own.run, own, options.run_dir)


def _is_ready(opened: _Opened, options: SyncerOptions, stop: threading.Event) -> bool:
    """Wait for the standby and for all shards.

    Returns:
        False if the standby has taken over, or if the process must stop.
    """
    service, door, replica = opened.service, opened.door, opened.service.replica

    def goes_on() -> bool:
        return replica.successor is None and not stop.is_set()

    if replica.is_behind:
        door.tell(f"waiting for its standby at {replica.address}")
        log.warning(
            "waiting for the standby at %s, which may have taken over. If it is lost: diloco syncer --run-dir %s "
            "--take-over",
            replica.address,
            options.run_dir,
        )
    while replica.is_behind and not stop.is_set():
        if replica.is_followed:  # the standby may need what a shard has
            opened.others.start()
        stop.wait(LOOK_S)
    if not goes_on():
        return False  # its shards need not load their files
    opened.others.start()
    if door.shards is not None and not opened.is_listening:
        _listen(opened.front, options)
        opened.is_listening = True
    service.attach()
    warn_s = time.monotonic() + WARN_S
    while (missing := service.missing) is not None and goes_on():
        door.tell(f"waiting for {missing.name}")
        if time.monotonic() > warn_s:
            warn_s += WARN_S
            log.warning("still waiting for %s; learners cannot join before", missing.name)
        stop.wait(LOOK_S)
    return goes_on()


def _serve(opened: _Opened, options: SyncerOptions, stop: threading.Event) -> Invitation | None:
    """Serve a run until its end; return the new primary if the standby has taken over instead."""
    service, door, front, telling = opened.service, opened.door, opened.front, opened.telling
    replica = service.replica
    door.refused, door.standby = service.heard, replica.on_get
    try:
        if _is_ready(opened, options, stop):
            service.start()
            door.open(service)
        if not opened.is_listening:
            _listen(front, options)
        while not stop.is_set() and replica.successor is None and not service.wait(LOOK_S):
            front.follow_rotation()
            front.name_standby(replica.address)
            if telling is not None and replica.address is not None:
                telling.end()
                telling = None
    finally:
        if telling is not None:
            telling.end()
        if replica.successor is None:
            summary = service.stop()
        else:
            door.close()
            service.abandon()
        opened.others.stop()
        front.stop()
    if service.error is not None:
        raise service.error
    if replica.successor is None:
        log.info("the run ended: %s", summary["status"])
        return None
    log.warning("the standby at %s has taken over; this syncer becomes its standby", replica.successor)
    differs_after(options.run_dir, replica.common_lsn)
    return Invitation.of(placed(front.address, replica.successor), opened.identity)


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
