"""The process of a shard, and the syncer's threads that start it again whenever it ends.

1. The process ends when its parent has ended. A syncer that is started again starts all its shards again.
2. It has the certificate of the run, and its own join file with the run's token.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning_diloco.errors import ConfigError, ShardError
from lightning_diloco.process import descriptors, grpc_log
from lightning_diloco.process.exit import let_threads_become_idle
from lightning_diloco.process.malloc import keep_few_heaps
from lightning_diloco.process.retry import retry
from lightning_diloco.storage.files import make_directory
from lightning_diloco.syncer.front import Front
from lightning_diloco.syncer.shards.elsewhere import Reporting, fetch_identity
from lightning_diloco.syncer.shards.layout import NO_PORT, directory_of, listen_of
from lightning_diloco.syncer.shards.remote import RemoteShard
from lightning_diloco.syncer.shards.service import ShardService
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.transport.address import JoinAddress, read_join_file
from lightning_diloco.transport.base import Connection
from lightning_diloco.transport.flight import FlightConnection
from lightning_diloco.transport.identity import ServerIdentity

log = logging.getLogger(__name__)

REACH_S = 60.0
LOOK_S = 0.1
AGAIN_S, AGAIN_AT_MOST_S = 0.5, 30.0
WORKS_S = 60.0  # a process that has lived for so long works
END_S = 60.0  # a snapshot may be under way


def serve_shard(run_dir: Path, part: tuple[int, int], listen: str, parent: int) -> int:
    """Serve a shard on the syncer's machine until SIGTERM, or until the parent has ended; return the exit code."""
    _set_up(part)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the syncer, which then ends its shards
    address = partial(read_join_file, directory_of(run_dir, part[0]) / "join")
    identity = ServerIdentity.load_or_create(run_dir / "syncer")
    return _serve(run_dir, part, listen, address, identity, goes_on=lambda: os.getppid() == parent)


def serve_elsewhere(run_dir: Path, part: tuple[int, int], listen: str, invitation: Invitation) -> int:
    """Serve a shard on another machine than the syncer's until SIGTERM or SIGINT; return the exit code.

    Args:
        run_dir: directory of the shard on this machine.
        part: (shard, number of shards).
        listen: `host:port`.
        invitation: address and key of the syncer.
    """
    _set_up(part)
    identity = retry(partial(fetch_identity, invitation, run_dir / "syncer"), within_s=REACH_S)
    return _serve(run_dir, part, listen, lambda: invitation.address, identity, reports_to=invitation)


def _set_up(part: tuple[int, int]) -> None:
    keep_few_heaps()
    form = f"%(asctime)s %(levelname)s shard {part[0]}: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    descriptors.allow_all()
    grpc_log.keep_to_errors()


def _serve(
    run_dir: Path,
    part: tuple[int, int],
    listen: str,
    address: Callable[[], JoinAddress],
    identity: ServerIdentity,
    *,
    goes_on: Callable[[], bool] = lambda: True,
    reports_to: Invitation | None = None,
) -> int:
    stop, directory = threading.Event(), directory_of(run_dir, part[0])
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    make_directory(directory)
    service, reporting = ShardService(directory, part, Invitation.of(address(), identity).key), None
    front = Front(service, directory, listen, address(), identity)  # the token may be a new one by now
    try:
        own = front.listen()
        if reports_to is not None:
            signal.signal(signal.SIGINT, lambda *_: stop.set())
            reporting = Reporting(reports_to, service, own.host_port)
        while not stop.wait(LOOK_S) and goes_on() and not service.is_over and service.error is None:
            front.follow_rotation()
    finally:
        if reporting is not None:
            reporting.end()
        service.stop()
        front.stop()
    let_threads_become_idle()
    if service.error is not None:
        raise service.error
    return 0


class ShardProcess:
    """A shard's process on this machine.

    Args:
        run_dir: RUN_DIR.
        part: (shard, number of shards).
        listen: `host:port` of the syncer.
        key: key that the shard expects.

    Attributes:
        shard: the shard, as the syncer sees it.
    """

    def __init__(self, run_dir: Path, part: tuple[int, int], listen: str, key: str) -> None:
        self._run_dir, self._part, self._listen = run_dir, part, listen
        self._join = directory_of(run_dir, part[0]) / "join"
        self._ending = threading.Event()
        self.shard = RemoteShard(part, address=self._address, connect=self._connect, key=key)
        self._thread = threading.Thread(target=self._watch, name=f"diloco-shard-{part[0]}", daemon=True)

    def start(self) -> None:
        """Start the process."""
        self._process = self._started()
        self._thread.start()

    def stop(self) -> None:
        """End the process, if it was started."""
        self._ending.set()
        if self._thread.ident is None:
            return
        self._thread.join()
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.error("%s did not end within %.0f s and is killed", self.shard.name, END_S)
            self._process.kill()
            self._process.wait()

    def _address(self) -> str:
        return f":{read_join_file(self._join).port}"

    def _connect(self) -> Connection:
        address = read_join_file(self._join)
        if address.port == NO_PORT:
            raise ShardError("it is starting")
        return FlightConnection(address)

    def _started(self) -> subprocess.Popen[bytes]:
        k, num_shards = self._part
        argv = [sys.executable, "-m", "lightning_diloco.cli.main", "syncer", "--run-dir", str(self._run_dir)]
        argv += ["--shard", f"{k}/{num_shards}", "--listen", listen_of(self._run_dir, k, self._listen)]
        return subprocess.Popen([*argv, "--embedded-by", str(os.getpid())], stdin=subprocess.DEVNULL)

    def _watch(self) -> None:
        pause_s, started_s = AGAIN_S, time.monotonic()
        while not self._ending.wait(LOOK_S):
            if self.shard.is_attached or time.monotonic() - started_s > WORKS_S:
                pause_s = AGAIN_S
            if self.shard.is_over or (code := self._process.poll()) is None:
                continue
            log.warning("%s has ended (exit code %d) and is started again; training goes on", self.shard.name, code)
            if self._ending.wait(pause_s):
                return
            pause_s = min(2 * pause_s, AGAIN_AT_MOST_S)
            try:
                self._process, started_s = self._started(), time.monotonic()
            except OSError as error:  # no memory for a process, for example
                log.error("%s cannot be started: %s; the syncer tries again", self.shard.name, error)


def parsed_part(text: str) -> tuple[int, int]:
    """Return (shard, number of shards) of "1/2".

    Raises:
        ConfigError: the text has another form.
    """
    k, _, num_shards = text.partition("/")
    if not (k.isdigit() and num_shards.isdigit() and 0 < int(k) < int(num_shards)):
        raise ConfigError(f"--shard {text}: must be k/S with 0 < k < S, for example 1/2; shard 0 is the syncer itself")
    return int(k), int(num_shards)
