"""Take a consistent snapshot of a whole run while it trains, and make a run directory from a snapshot.

    DIR/syncer, DIR/tape, DIR/join     as in RUN_DIR
    DIR/checkpoints/<learner>/         one checkpoint of each learner
    DIR/snapshot.json                  description of the snapshot; written last

1. `take` first copies the syncer's snapshot and log. Together they are a state of the run (the cut). The copies of the
   shards' files are cut back to its versions. Then `take` leaves a marker, and each learner that trains answers with a
   checkpoint. Each checkpoint is therefore newer than all contributions that are merged in the cut, and no learner
   trains on the data of these contributions again.
2. Contributions that were in transit at the cut are in neither part. The ledger of the cut counts them as pending. In a
   run made from the snapshot, each learner gets a new incarnation and adopts the anchors, and the ledger books the
   pending tokens as lapsed. The ledger stays exact. The time from the snapshot to the start of that run counts as
   paused, as after Ctrl-C.
3. `take` opens and checks the copy (checksums, ledger) before it accepts it.
4. The copy has the run id, token and certificate of the run. It is therefore as secret as RUN_DIR, and readable by its
   owner only. The run made from it gets its own port, so that both runs can be served at the same time.

Source: Chandy and Lamport, "Distributed Snapshots" (1985).
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_diloco.errors import ConfigError, CorruptLogError, StorageError
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.storage.checkpoint_store import CheckpointStore, Entry
from lightning_diloco.storage.files import make_directory, storage, write_whole
from lightning_diloco.storage.tape import TAPE, Tape
from lightning_diloco.syncer.shards.layout import directory_of, num_shards_of
from lightning_diloco.syncer.shards.store import cut_back
from lightning_diloco.syncer.shards.whole import no_files, read_shard
from lightning_diloco.syncer.status.history import CLOSED
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.address import is_loopback, read_join_file, write_join_file
from lightning_diloco.transport.base import Json

log = logging.getLogger(__name__)

ABOUT = "snapshot.json"
NUM_ATTEMPTS = 5
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Description of a snapshot.

    Args:
        run: run id.
        lsn: number of the last log record.
        versions: version of each fragment.
        steps: optimizer steps in each learner's checkpoint, by learner id.
        tokens_merged, tokens_pending: totals of the ledger, in token x fragment.
    """

    run: str
    lsn: int
    versions: tuple[int, ...]
    steps: dict[str, int]
    tokens_merged: int
    tokens_pending: int


def take(
    run_dir: Path, to: Path, store: CheckpointStore, stepping: Callable[[], Iterable[str]], *, within_s: float
) -> RunSnapshot:
    """Take a snapshot of a run.

    Args:
        run_dir: RUN_DIR; its syncer may be running.
        to: a new or empty directory.
        store: store of the learners' checkpoints.
        stepping: returns the ids of the learners that are training now; called repeatedly.
        within_s: seconds to wait for their checkpoints.

    Raises:
        ConfigError: `to` is not empty, or there is no run.
        StorageError: a learner did not answer in time, the ledger is not exact, or a disk failed.
    """
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"{to} is not empty; a snapshot needs a directory of its own; name another one with --to")
    make_directory(to)
    found = _cut(run_dir, to)
    marker = secrets.token_hex(8)
    store.ask(marker)
    try:
        answers = _answers(store, marker, stepping, within_s)
    finally:
        store.ask(None)
    copies = CheckpointStore(str(to / "checkpoints"))
    for entry in answers:
        copies.copy(store, entry)
    found = replace(found, steps={entry.learner: entry.step for entry in answers})
    write_whole(to / ABOUT, json.dumps(_about(found), indent=2).encode() + b"\n")
    return found


def begin_from(snapshot: Path, run_dir: Path) -> Json:
    """Make a new run directory from a snapshot, which `diloco syncer --run-dir` and learners can continue.

    Returns:
        The content of snapshot.json.

    Raises:
        ConfigError: the snapshot is missing or incomplete, or the run directory is in use.
    """
    check_whole(snapshot)
    if taken := [name for name in ("join", "syncer", "checkpoints") if (run_dir / name).exists()]:
        raise ConfigError(f"{run_dir} holds {', '.join(taken)}: a run from a snapshot needs a new directory")
    address = read_join_file(snapshot / "join")
    content: Json = json.loads((snapshot / ABOUT).read_text())
    with storage("copy the snapshot to", run_dir):
        for part in ("syncer", "tape", *(["checkpoints"] if content["steps"] else [])):
            shutil.copytree(snapshot / part, run_dir / part)
    _note_pause(run_dir, content["taken_s"])
    write_join_file(run_dir / "join", replace(address, port=_free_port(address.host)))
    return content


def check_whole(snapshot: Path) -> None:
    """Check that a directory is a whole snapshot.

    Raises:
        ConfigError: the snapshot is missing or incomplete.
    """
    if not (snapshot / ABOUT).is_file():
        raise ConfigError(f"{snapshot} has no {ABOUT}: it is not a whole snapshot; take one: diloco snapshot")


def _note_pause(run_dir: Path, since_s: float) -> None:
    """Note on the tape that the run was closed at this unix time, so that it counts as paused until it is continued."""
    tape = Tape(run_dir / TAPE)
    try:
        tape.record(CLOSED, lsn=None, late_s=max(0.0, time.time() - since_s))
    finally:
        tape.close()


def _cut(run_dir: Path, to: Path) -> RunSnapshot:
    """Copy the syncer's files; try again if they change during the copy."""
    if not (run_dir / "join").exists():
        raise ConfigError(f"{run_dir} holds no run: it has no join file; name the directory of a run that was started")
    if not (run_dir / "syncer" / "snapshot").exists():
        raise ConfigError(f"{run_dir} has no start values yet; wait until a learner trains")
    for attempt in range(1, NUM_ATTEMPTS + 1):
        try:
            _copy(run_dir, to)
            return _opened(to)
        except (FileNotFoundError, CorruptLogError, shutil.Error) as error:
            log.info("files changed during the copy, attempt %d of %d: %s", attempt, NUM_ATTEMPTS, error)
            shutil.rmtree(to / "syncer", ignore_errors=True)
            last = error
    raise StorageError(f"{run_dir} changed during each of {NUM_ATTEMPTS} copies: {last}; try again")


def _copy(run_dir: Path, to: Path) -> None:
    shutil.copytree(run_dir / "tape", to / "tape", dirs_exist_ok=True)
    _copy_state(run_dir / "syncer", to / "syncer")
    shutil.copy2(run_dir / "join", to / "join")
    for name in ("identity.pem", "num_shards"):
        if (run_dir / "syncer" / name).exists():
            shutil.copy2(run_dir / "syncer" / name, to / "syncer" / name)
    # Copy the shards last: they have an outer gradient before the syncer decides.
    for k in range(1, num_shards_of(run_dir)):
        if not (directory_of(run_dir, k) / "snapshot").exists():
            raise no_files(run_dir, k)
        _copy_state(directory_of(run_dir, k), directory_of(to, k))


def _copy_state(source: Path, target: Path) -> None:
    """Copy snapshot and log of the syncer or of a shard."""
    shutil.copytree(source / "snapshot", target / "snapshot")
    # After the snapshot. If the log no longer reaches back to the snapshot, opening the copy fails.
    shutil.copytree(source / "log", target / "log")


def _opened(to: Path) -> RunSnapshot:
    """Open and check the copy as a syncer and its shards do. This removes what came after the cut."""
    num_shards = num_shards_of(to)
    state, durable = SyncerState(run="any"), SyncerStore(to, num_shards=num_shards)
    try:
        if durable.restore(state, time.monotonic()) is None:
            raise CorruptLogError("the log has no record of the start values yet")
        versions = tuple(f.version for f in state.rounds.fragments)
        for k in range(1, num_shards):
            cut_back(directory_of(to, k), versions)
            read_shard(to, (k, num_shards), state)
        totals = state.ledger.totals()
        if not totals.is_exact:
            raise StorageError(f"the ledger of the copy does not add up: {totals}; the snapshot was not written")
        return RunSnapshot(state.run, durable.log.last_lsn, versions, {}, totals.merged, totals.pending)
    finally:
        durable.close()


def _answers(
    store: CheckpointStore, marker: str, stepping: Callable[[], Iterable[str]], within_s: float
) -> list[Entry]:
    """Collect one checkpoint of each learner: with the marker if the learner trains, otherwise the newest."""
    deadline_s, answers = time.monotonic() + within_s, dict[str, Entry]()
    while missing := sorted(set(stepping()) - answers.keys()):
        answers |= {name: entry for name in missing if (entry := _answer(store, name, marker)) is not None}
        late = sorted(set(missing) - answers.keys())
        if late and time.monotonic() > deadline_s:
            raise StorageError(
                f"no checkpoint of {', '.join(late)} came within {within_s:.0f} s; each learner that trains must write "
                f"to {store.url}; wait longer, or set checkpoint_every and checkpoint_store there"
            )
        time.sleep(LOOK_S)
    others = {name: entries[0] for name in store.learners() if name not in answers and (entries := store.entries(name))}
    return [*answers.values(), *others.values()]


def _answer(store: CheckpointStore, learner: str, marker: str) -> Entry | None:
    newest = next(iter(store.entries(learner)), None)
    return newest if newest is not None and store.read(newest).marker == marker else None


def _about(found: RunSnapshot) -> Json:
    return {
        "run": found.run,
        "taken_s": time.time(),
        "lsn": found.lsn,
        "versions": list(found.versions),
        "steps": found.steps,
        "tokens_merged": found.tokens_merged,
        "tokens_pending": found.tokens_pending,
    }


def _free_port(host: str) -> int:
    """Return a free port of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host if is_loopback(host) else "", 0))
        return int(probe.getsockname()[1])
