"""A syncer that kills itself at random points, loses data that it had not fsynced, and keeps a journal.

python -m tests.bench.watched_syncer '{"journal": DIR, "seed": S, "num_kills": N, "fsync": true}' SYNCER_OPTIONS

1. The points are the named ones of log and snapshots, before, within and after every write. It sends itself SIGKILL
   there.
2. The journal survives it, because each line is one write, which only a crash of the machine would lose. A process
   reads only the fsynced sizes from the journals of earlier ones.
3. Before it opens the run, it imitates a power cut: it removes an arbitrary part of the data in the log that was not
   fsynced.
4. Without fsync, nothing counts as on disk. This imitates a syncer that sends data before it is durable.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lightning_diloco.cli.main import main as diloco
from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.syncer.ledger import Account
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.storage import snapshots
from lightning_diloco.syncer import process as syncer_module
from lightning_diloco.syncer.anchors import Anchor, AnchorStore
from lightning_diloco.syncer.outbox import Outbox
from lightning_diloco.syncer.store import SyncerStore
from tests.storage.faults import POINTS

MAX_WRITES_BEFORE_KILL = 40
MIN_LOG_BYTES = 1 << 18  # small, so that snapshots are frequent
TENSORS = ("master", "published", "momentum")


class Journal:
    """The journal of one process, and the fsynced sizes of all of them.

    Args:
        folder: folder with one file per process.
        has_disk: whether fsync has an effect.
    """

    def __init__(self, folder: Path, *, has_disk: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.life = len(list(folder.glob("life-*.jsonl")))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._fd = os.open(folder / f"life-{self.life:02d}.jsonl", flags, 0o600)
        self._synced_path = folder / "synced.jsonl"
        self._synced_fd = os.open(self._synced_path, flags, 0o600)
        self._fsync = os.fsync
        self._has_disk = has_disk
        os.fsync = self._watched_fsync

    def write(self, what: str, **fields: Any) -> None:
        """Add a line."""
        os.write(self._fd, json.dumps({"t": time.time(), "what": what, **fields}).encode() + b"\n")

    def _watched_fsync(self, fd: int) -> None:
        if not self._has_disk:
            return
        self._fsync(fd)
        status = os.fstat(fd)
        os.write(self._synced_fd, f"[{status.st_ino}, {status.st_size}]\n".encode())

    def cut_power(self, log: Path, chance: random.Random) -> None:
        """Remove an arbitrary part of the data that was not fsynced."""
        synced = dict(json.loads(line) for line in self._synced_path.read_text().splitlines())
        for path in sorted(log.glob("*.log")):
            status = path.stat()
            durable = min(status.st_size, synced.get(status.st_ino, 0))
            kept = chance.randint(durable, status.st_size)
            os.truncate(path, kept)
            self.write("cut", file=path.name, of=status.st_size, durable=durable, kept=kept)


class Executioner:
    """Kills this process at a random point; installed as the run's hook at named points."""

    def __init__(self, journal: Journal, chance: random.Random) -> None:
        self._journal = journal
        self._point = chance.choice(POINTS)
        writes = "append:before" if self._point.startswith(("append", "sync")) else self._point.split(":")[0]
        self._num_passes = chance.randint(1, MAX_WRITES_BEFORE_KILL if writes == "append:before" else 2)

    def __call__(self, point: str) -> None:
        """Called when the run is at this point."""
        self._num_passes -= point == self._point
        if point == self._point and self._num_passes == 0:
            self._journal.write("killed", point=point)
            os.kill(os.getpid(), signal.SIGKILL)


def watch(journal: Journal) -> None:
    """Record what is computed, written, durable, installed, booked and sent, and the state after a restart."""
    restore, write, put, close = SyncerStore.restore, SyncerStore.write, Outbox.put, Account.close
    next_state, install = AnchorStore.next_state, AnchorStore.install

    def restored(self: SyncerStore, state: SyncerState, now_s: float) -> AnchorStore | None:
        store = restore(self, state, now_s)
        accounts = codec.dump(state.saved())["accounts"]
        journal.write("restored", fragments=_fragments(store), accounts=accounts, lsn=self.log.last_lsn)
        return store

    def written(self: SyncerStore, record: Any, payload: Any = b"") -> int:
        journal.write("writing", record=record)
        lsn = write(self, record, payload)
        journal.write("durable", lsn=lsn)
        return lsn

    def computed(self: AnchorStore, p: int, outer_gradient: Any, **how: Any) -> Anchor:
        state = next_state(self, p, outer_gradient, **how)
        journal.write("computed", fragment=p, **_fingerprint(state))
        return state

    def installed(self: AnchorStore, p: int, state: Anchor) -> None:
        install(self, p, state)
        journal.write("installed", fragment=p, **_fingerprint(state))

    def told(self: Outbox, session: str, message: Any) -> None:
        if message["kind"] == "Commit":
            journal.write("told", **{name: message[name] for name in ("fragment", "generation", "version")})
        put(self, session, message)

    def closed(self: Account, cause: str) -> None:
        close(self, cause)
        journal.write("booked", account=[self.learner, self.incarnation], booked=dict(self.booked))

    SyncerStore.restore, SyncerStore.write, Outbox.put, Account.close = restored, written, told, closed
    AnchorStore.next_state, AnchorStore.install = computed, installed


def _fragments(store: AnchorStore | None) -> list[dict[str, Any]]:
    return [] if store is None else [_fingerprint(store.anchor(p)) for p in range(len(store.layouts))]


def _fingerprint(anchor: Anchor) -> dict[str, Any]:
    bits = {name: hashlib.sha256(bytes_of(getattr(anchor, name))).hexdigest() for name in TENSORS}
    return {"generation": anchor.generation, "version": anchor.version, "bits": bits}


def main() -> int:
    """Run a syncer until it kills itself."""
    given, options = json.loads(sys.argv[1]), sys.argv[2:]
    journal = Journal(Path(given["journal"]), has_disk=given["fsync"])
    chance = random.Random(f"{given['seed']}/{journal.life}")
    run_dir = Path(options[options.index("--run-dir") + 1])
    journal.write("started")
    journal.cut_power(run_dir / "syncer" / "log", chance)
    if journal.life < given["num_kills"]:
        syncer_module.SyncerStore = functools.partial(SyncerStore, faults=Executioner(journal, chance))
    snapshots.MIN_LOG_BYTES = MIN_LOG_BYTES
    watch(journal)
    return diloco(["syncer", *options])


if __name__ == "__main__":
    raise SystemExit(main())
