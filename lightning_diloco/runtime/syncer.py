"""The syncer process: the protocol machine, the anchors and the disk, behind a transport.

1. One loop thread drives the machine: transport threads only queue events (and look, under a lock, for `status`).
   Actions are carried out in order: a message is sent only after every record before it is on disk.
2. One merge thread does the arithmetic, a round at a time. A commit goes: next state computed, record on disk,
   installed and told by the loop thread.
3. Payloads are checked where they arrive, before the machine hears of them.
4. A disk that does not take a record holds back whatever depends on it, and is tried again; learners train on.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.merge import contribution_weight
from lightning_diloco.core.quantize import check_fragment, wire_nbytes
from lightning_diloco.errors import ConfigError, CorruptMessageError, StorageError
from lightning_diloco.protocol import SyncerState, actions, codec, events, messages, records
from lightning_diloco.runtime import report
from lightning_diloco.runtime.anchors import Anchor, AnchorStore, bytes_of, tensor_of
from lightning_diloco.runtime.durable import Durable
from lightning_diloco.runtime.files import write_file
from lightning_diloco.runtime.manifest import plan_of
from lightning_diloco.runtime.outbox import Outbox
from lightning_diloco.runtime.progress import EVENT as PROGRESS
from lightning_diloco.runtime.progress import pause_s, progress
from lightning_diloco.transport.address import (
    JoinAddress,
    is_loopback,
    new_token,
    read_join_file,
    split_host_port,
    write_join_file,
)
from lightning_diloco.transport.base import Bulk, Json, Polled
from lightning_diloco.transport.flight import FlightServer
from lightning_diloco.transport.identity import ServerIdentity

log = logging.getLogger(__name__)

TICK_S = 0.05
EVALUATE_WAIT_S = 120.0
LISTENING_S = 3.0
RETRY_S = 1.0
NORM_GUARD = 10.0
MIN_GUARD_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerOptions:
    """What a syncer process is started with.

    Args:
        run_dir: RUN_DIR.
        listen: host:port; port 0 for any.
        expect: learners to hold the first step for; the run ends when as many have finished.
        embedded: started by a learner; ends when the last learner is gone.
        run_options: explicit `RunConfig` options.
        reseed: open an empty run directory although learners may know the run.
        record_contributions: also keep the received bytes.
    """

    run_dir: Path
    listen: str = "127.0.0.1:0"
    expect: int | None = None
    embedded: bool = False
    run_options: dict[str, Any] = field(default_factory=dict)
    reseed: bool = False
    record_contributions: bool = False


@dataclass(frozen=True, slots=True)
class _Installed:
    """A commit whose record is on disk; the loop thread installs it."""

    event: events.Committed
    anchor: Anchor
    norms: Sequence[float]


class SyncerService:
    """Implements the transport's `Handler`.

    Args:
        options: see `SyncerOptions`.
        run: run id of a new run directory.
    """

    def __init__(self, options: SyncerOptions, *, run: str, durable: Durable | None = None) -> None:
        RunConfig.from_dict(options.run_options)
        self._options = options
        self._started_s = time.monotonic()
        self._durable = durable or Durable(options.run_dir)
        self.state = SyncerState(run=run, options=dict(options.run_options), expect=options.expect)
        self._store = self._durable.restore(self.state, time.monotonic())
        self._outbox = Outbox()
        self._events: queue.SimpleQueue[events.SyncerEvent | _Installed | None] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[actions.Merge | actions.Apply | None] = queue.SimpleQueue()
        self._payloads: dict[tuple[str, int], tuple[messages.Ready, Tensor]] = {}
        self._merged_seqs: dict[tuple[str, int], tuple[int, int]] = {}
        self._gradients: dict[int, tuple[int, Tensor, Sequence[float]]] = {}
        self._norms: dict[int, tuple[float, int]] = {}
        self._seed: actions.StoreSeed | None = None
        self._seed_values: dict[tuple[str, int, int], Tensor] = {}
        self._todo: deque[actions.SyncerAction] = deque()
        self._retry_s = self._next_progress_s = 0.0
        self._polled_s: dict[str, float] = {}
        self._transferred_s: dict[str, float] = {}
        self._num_applying = 0
        self._held_back: list[actions.Apply] = []
        self._bytes_up = self._bytes_down = 0
        self._counting = threading.Lock()
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._quiet_since_s: float | None = None
        self.error: BaseException | None = None
        self._remember_merged()
        self._threads = [
            threading.Thread(target=self._guarded, args=(run_thread,), name=name, daemon=True)
            for name, run_thread in (("diloco-loop", self._loop), ("diloco-merge", self._merge_loop))
        ]

    # ------------------------------------------------------------------------------------------------------- lifetime

    def start(self) -> None:
        """Begin to work."""
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the run has ended by itself, or the syncer failed; returns whether it has."""
        return self._ended.wait(timeout_s)

    def stop(self) -> Json:
        """Stop all threads, close the disk, and return the run's summary, written to RUN_DIR/summary.json."""
        self._events.put(None)
        self._jobs.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._outbox.close()
        is_finished = self.state.is_finished and self.error is None
        self.state.finish()
        summary = report.summary(
            self.state, status="finished" if is_finished else "interrupted", **self._figures(wall="wall_s")
        )
        write_file(self._options.run_dir / "summary.json", _json(summary))
        self._durable.close()
        return summary

    def _figures(self, *, wall: str) -> dict[str, Any]:
        now_s = time.monotonic()
        return {
            wall: now_s - self._started_s,
            "now_s": now_s,
            "bytes_up": self._bytes_up,
            "bytes_down": self._bytes_down,
        }

    def _guarded(self, run_thread: Any) -> None:
        """A thread that fails ends the process with its error: nothing runs on half."""
        try:
            run_thread()
        except BaseException as error:
            log.exception("the syncer stops")
            self.error = error
            self._ended.set()

    # -------------------------------------------------------------------------------------------- called by transport

    def on_send(self, session: str, messages_: Sequence[Json]) -> Json:
        """Queue control messages for the machine."""
        decoded = [messages.decode(message, messages.FromLearner) for message in messages_]
        for message in decoded:
            self._events.put(events.FromALearner(session, cast("messages.FromLearner", message)))
        return {}

    def on_poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        """Hand out waiting messages."""
        self._polled_s[session] = time.monotonic()
        return self._outbox.poll(session, cursor, wait_s)

    def on_put(self, bulk: Bulk) -> Json:
        """Take a contribution, or a part of the seed."""
        self._count(up=bulk.payload.nbytes)
        values = tensor_of(bulk.payload, torch.uint8)
        session = str(bulk.header.get("session"))
        self._transferred_s[session] = time.monotonic()
        if bulk.header.get("what") == "seed":
            self._take_seed(session, bulk.header, values)
        else:
            self._take_contribution(session, codec.load(messages.Ready, bulk.header["ready"]), values)
        return {}

    def on_get(self, header: Json) -> Bulk:
        """What brings a learner up to date: {"session", "fragment", "generation", "have"} -> update."""
        store = self._store
        p, session = header.get("fragment"), str(header.get("session"))
        if store is None or type(p) is not int or not 0 <= p < len(store.layouts):
            raise CorruptMessageError(
                f"fragment {p!r} was asked for; the run has none of that number, or no values yet"
            )
        self._transferred_s[session] = time.monotonic()
        update = store.update_for(p, header.get("have"), generation=header.get("generation"))
        # Read after the update: a merge recorded meanwhile has a higher version and is not part of it.
        seq, version = self._merged_seqs.get((session, p), (None, 0))
        self._count(down=update.payload.nbytes)
        answer = {
            "kind": update.kind,
            "generation": update.generation,
            "from_version": update.from_version,
            "version": update.version,
            "merged_seq": seq if version <= update.version else None,
            "digest": store.digest(p) if update.kind == "full" else None,
        }
        return Bulk(answer, update.payload)

    def on_status(self) -> Json:
        """The run as people see it."""
        with self._looking:
            return report.status(self.state, **self._figures(wall="uptime_s"))

    def _count(self, *, up: int = 0, down: int = 0) -> None:
        with self._counting:
            self._bytes_up += up
            self._bytes_down += down

    def _take_contribution(self, session: str, ready: messages.Ready, payload: Tensor) -> None:
        store, config = self._store, self.state.config
        if store is None or not 0 <= ready.fragment < len(store.layouts):
            raise CorruptMessageError(f"a contribution to fragment {ready.fragment}; the run has no such fragment yet")
        layout = store.layouts[ready.fragment]
        wanted = wire_nbytes(layout.padded_numel, config.wire, config.block_size)
        error = None
        if payload.numel() != wanted:
            error = f"{payload.numel()} bytes, fragment {ready.fragment} takes {wanted} as {config.wire}"
        else:
            try:
                check_fragment(layout, payload, config.wire, config.block_size)
            except ValueError as problem:
                error = str(problem)
        if error is None:
            self._payloads[session, ready.fragment] = (ready, payload)
        self._events.put(events.PayloadReceived(session, ready, error))

    def _take_seed(self, session: str, header: Json, values: Tensor) -> None:
        p, lease = header.get("fragment"), header.get("lease")
        if type(p) is not int or type(lease) is not int:
            raise CorruptMessageError(f"start values with fragment={p!r}, lease={lease!r}; both must be integers")
        self._seed_values[session, lease, p] = values.view(torch.float32)

    # ----------------------------------------------------------------------------------------------------- loop thread

    def _loop(self) -> None:
        next_tick_s = 0.0
        while True:
            try:
                event = self._events.get(timeout=TICK_S)
            except queue.Empty:
                event = events.Tick()
            if event is None:
                return
            now_s = time.monotonic()
            if isinstance(event, _Installed):
                self._install(event, now_s)
            else:
                self._num_applying -= isinstance(event, events.CommitFailed)
                self._handle(event, now_s)
            if now_s >= next_tick_s:
                next_tick_s = now_s + TICK_S
                for session, heard_s in list(self._transferred_s.items()):
                    self.state.roster.heard(session, heard_s)
                self._handle(events.Tick(), now_s)
                self._note_progress(now_s)
                self._store_seed()
                self._end_if_over(now_s)

    def _note_progress(self, now_s: float) -> None:
        if self.state.manifest is not None and now_s >= self._next_progress_s:
            self._next_progress_s = now_s + pause_s(now_s - self._started_s)
            self._durable.note(PROGRESS, **progress(report.status(self.state, **self._figures(wall="uptime_s"))))

    def _handle(self, event: events.SyncerEvent, now_s: float) -> None:
        with self._looking:
            todo = self.state.handle(event, now_s)
        self._do(todo)

    def _do(self, todo: Sequence[actions.SyncerAction]) -> None:
        """Carry out actions in order. A record that the disk does not take holds up all that come after it."""
        self._todo.extend(todo)
        while self._todo and time.monotonic() >= self._retry_s:
            try:
                self._carry_out(self._todo[0])
            except StorageError as error:
                self._retry_s = time.monotonic() + RETRY_S
                self.state.rounds.suspended = str(error)
                log.error("nothing is committed, learners train on: %s", error)
                return
            self._todo.popleft()

    def _carry_out(self, action: actions.SyncerAction) -> None:
        match action:
            case actions.Record():
                self._durable.write(action.values)
                if action.values["kind"] == records.Regenerated.__name__ and self._store is not None:
                    self._store.regenerate(self.state.rounds.generation)
            case actions.Send():
                self._outbox.put(action.session, messages.encode(action.message))
            case actions.Merge():
                self._jobs.put(action)
            case actions.Apply():
                self._apply(action)
            case actions.DropPayload():
                held = self._payloads.get((action.session, action.fragment))
                if held is not None and held[0].seq == action.seq:
                    del self._payloads[action.session, action.fragment]
            case actions.StoreSeed():
                self._seed = action
            case actions.Note():
                log.info("%s %s", action.event, action.fields)
                self._durable.note(action.event, **action.fields)

    def _apply(self, action: actions.Apply) -> None:
        """Have a commit written; while a snapshot waits for a quiet moment, hold it back."""
        if self._store is not None and self._durable.is_snapshot_due(self._store):
            self._held_back.append(action)
            self._snapshot_if_quiet()
        else:
            self._num_applying += 1
            self._jobs.put(action)

    def _snapshot_if_quiet(self) -> None:
        if self._num_applying or not self._held_back:
            return
        store, manifest = self._store, self.state.manifest
        assert store is not None
        assert manifest is not None
        self._durable.begin_snapshot(codec.dump(self.state.saved()), manifest, store, self._snapshot_failed)
        held_back, self._held_back = self._held_back, []
        for action in held_back:
            self._num_applying += 1
            self._jobs.put(action)

    def _snapshot_failed(self, error: Exception) -> None:
        log.error("no snapshot was written, the log goes on growing: %s", error)

    def _install(self, installed: _Installed, now_s: float) -> None:
        p = installed.event.fragment
        record = self.state.applying(p)
        for merge in record.merges:
            self._merged_seqs[merge.session, p] = (merge.ready.seq, record.version)
        assert self._store is not None
        self._store.install(p, installed.anchor)
        self._learn_norms(p, installed.norms)
        self._num_applying -= 1
        self._handle(installed.event, now_s)
        self._snapshot_if_quiet()

    def _remember_merged(self) -> None:
        """After a restart, from the fates on record."""
        for member in self.state.roster.members.values():
            for p, (seq, fate, version, _) in member.fates.items():
                if fate == "merged" and version is not None:
                    self._merged_seqs[member.session, p] = (seq, version)

    def _store_seed(self) -> None:
        """Once all parts of the seed are here, make them the anchors at version 0."""
        if self._seed is None:
            return
        action = self._seed
        num_fragments = cast("int", action.manifest["num_fragments"])
        keys = [(action.session, action.lease, p) for p in range(num_fragments)]
        if not all(key in self._seed_values for key in keys):
            return
        self._seed, error, digests = None, None, ()
        store = AnchorStore(*plan_of(action.manifest))
        try:
            for p, key in enumerate(keys):
                store.seed(p, self._seed_values[key])
            self._durable.store_seed(codec.dump(self.state.saved()), action.manifest, store)
            self._store, digests = store, store.digests()
        except (StorageError, ValueError) as problem:
            error = str(problem)
        self._seed_values.clear()
        self._handle(events.SeedStored(action.lease, digests, error), time.monotonic())

    def _end_if_over(self, now_s: float) -> None:
        """An expected or embedded fleet that has gone, and whose last member has spoken, ends the run."""
        num_finished = len({m.learner for m in self.state.roster.in_state("left") if m.ending == "finished"})
        if self._options.embedded:
            is_over = self.state.is_finished and not self.state.roster.in_state("joining", "confirmed")
        elif self._options.expect is not None:
            is_over = self.state.is_finished and num_finished >= self._options.expect
        else:
            return
        if not is_over:
            self._quiet_since_s = None
            return
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        last = max(self.state.roster.in_state("left"), key=lambda m: m.ended_s or 0.0, default=None)
        is_listening = last is not None and now_s - self._polled_s.get(last.session, 0.0) < LISTENING_S
        waited_s = now_s - self._quiet_since_s
        if self.state.has_verdict or not is_listening or waited_s > EVALUATE_WAIT_S:
            self._ended.set()

    # ---------------------------------------------------------------------------------------------------- merge thread

    def _merge_loop(self) -> None:
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            if isinstance(job, actions.Merge):
                self._events.put(self._merge(job))
            else:
                self._events.put(self._commit(job))

    def _merge(self, job: actions.Merge) -> events.SyncerEvent:
        assert self._store is not None
        payloads = [self._payloads[c.session, c.ready.fragment][1] for c in job.contributions]
        weights = [contribution_weight(c.ready.tokens, c.ready.steps) for c in job.contributions]
        gradient, found = self._store.merge(job.fragment, payloads, weights, max_norm=self._max_norm(job.fragment))
        self._gradients[job.fragment] = (job.round, gradient, found.norms)
        return events.Merged(job.fragment, job.round)

    def _commit(self, job: actions.Apply) -> events.SyncerEvent | _Installed:
        assert self._store is not None
        number, gradient, norms = self._gradients[job.fragment]
        assert number == job.round
        anchor = self._store.next_state(job.fragment, gradient, steps=job.steps)
        try:
            self._durable.write(job.record, bytes_of(gradient))
        except StorageError as error:
            log.error("commits are suspended, learners train on: %s", error)
            return events.CommitFailed(job.fragment, job.round, str(error))
        return _Installed(events.Committed(job.fragment, job.round, anchor.digest), anchor, norms)

    def _max_norm(self, p: int) -> float:
        mean, num_samples = self._norms.get(p, (0.0, 0))
        return NORM_GUARD * mean if num_samples >= MIN_GUARD_SAMPLES else float("inf")

    def _learn_norms(self, p: int, norms: Sequence[float]) -> None:
        mean, num_samples = self._norms.get(p, (0.0, 0))
        for norm in norms:
            num_samples += 1
            mean += (min(norm, NORM_GUARD * mean if mean else norm) - mean) / min(num_samples, 20)
        self._norms[p] = (mean, num_samples)


def _json(values: Json) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"


# -------------------------------------------------------------------------------------------------------- the process


def serve(options: SyncerOptions) -> int:
    """Serve a run until it is over, or until SIGTERM or SIGINT; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    options.run_dir.mkdir(parents=True, exist_ok=True)
    address, identity = _address_and_identity(options)
    service = SyncerService(options, run=address.run)
    server = FlightServer(service, options.listen, token=address.token, tls=identity)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    service.start()
    server.start()
    join = server.join_address(service.state.run, _reachable_host(options.listen))
    write_join_file(options.run_dir / "join", join)
    log.info(
        "run %s is served at %s; learners join with the string in %s",
        join.run,
        join.redacted(),
        options.run_dir / "join",
    )
    try:
        while not stop.is_set() and not service.wait(0.1):
            pass
    finally:
        summary = service.stop()
        server.stop()
    log.info("the run ended: %s", summary["status"])
    if service.error is not None:
        raise service.error
    return 0


def _address_and_identity(options: SyncerOptions) -> tuple[JoinAddress, ServerIdentity | None]:
    """The run id, token and certificate of this run directory; made at its first start, kept ever after."""
    host, port = split_host_port(options.listen)
    identity = None if is_loopback(host) else ServerIdentity.load_or_create(options.run_dir / "syncer")
    join, redo_log = options.run_dir / "join", options.run_dir / "syncer" / "log"
    if join.exists() != redo_log.exists() and not options.reseed:
        found, lost = (join, redo_log) if join.exists() else (redo_log, join)
        raise ConfigError(
            f"{found} is there, {lost} is not: this run directory has lost a part of a run that learners know. "
            "Restore it; or begin the run anew from the learners' checkpoints with --reseed"
        )
    if join.exists():
        return read_join_file(join), identity
    run = f"{options.run_dir.name[:40] or 'run'}-{secrets.token_hex(3)}"
    return JoinAddress(host, port or 1, _run_id(run), new_token(), identity.fingerprint if identity else None), identity


def _run_id(text: str) -> str:
    allowed = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in text)
    return allowed.lstrip("._-") or "run"


def _reachable_host(listen: str) -> str | None:
    """How learners elsewhere reach this machine when it listens on every address."""
    host, _ = split_host_port(listen)
    if host in ("0.0.0.0", "::"):
        import socket

        return os.environ.get("DILOCO_HOST") or socket.getfqdn()
    return None
