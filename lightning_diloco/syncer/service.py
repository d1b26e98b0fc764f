"""The syncer's service: connects state machine, anchors and disk with a transport.

1. The loop thread drives the state machine. Transport threads only queue events, and read the state under a lock for
   `status`. The state machine uses the arrival time of an event (`inbox.py`). The loop thread carries out actions in
   order: it sends a message only after all records before it are on disk.
2. Each shard has a merge thread, which computes merges and outer steps (`merge_worker.py`). A further thread installs
   durable commits, and the loop thread announces them. If there is a standby, this thread and one for messages hold
   them back until the standby has all records before them (`standby/announcer.py`).
3. Transport threads check a payload before they queue its event for the state machine.
4. If the disk fails to write a record, later actions wait until a retry succeeds. Learners keep training. The syncer
   refuses a call while more than MAX_WAITING events wait, or more events of one session than `inbox.py` allows. A flood
   or a long disk failure therefore needs bounded memory.
5. The loop thread starts a snapshot between two actions, while no commit is being written.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, cast

from lightning_diloco.config import PROTOCOL_VERSION, RunConfig
from lightning_diloco.errors import CorruptMessageError, ShardError, StorageError, TransportError
from lightning_diloco.manifest import manifest_file
from lightning_diloco.protocol import actions, codec, events, messages
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.protocol.syncer.succession import IN_FLIGHT, changed_by
from lightning_diloco.storage.files import write_whole
from lightning_diloco.syncer.anchors import AnchorStore
from lightning_diloco.syncer.contribution_archive import Recorder
from lightning_diloco.syncer.inbox import Inbox, Place
from lightning_diloco.syncer.merge_worker import DurableCommit, MergeWorker
from lightning_diloco.syncer.options import SyncerOptions
from lightning_diloco.syncer.outbox import Outbox
from lightning_diloco.syncer.payloads import Payloads, made_up, merged_by
from lightning_diloco.syncer.run_end import RunEnd
from lightning_diloco.syncer.seeding import Seeding
from lightning_diloco.syncer.shards.remote import RemoteShard, admitted, attachment
from lightning_diloco.syncer.shards.requests import Attach
from lightning_diloco.syncer.shards.shard import OwnShard, Shard
from lightning_diloco.syncer.standby.announcer import Announcer
from lightning_diloco.syncer.standby.replica import Replica
from lightning_diloco.syncer.standby.requests import STANDBY
from lightning_diloco.syncer.status.arrivals import Arrivals
from lightning_diloco.syncer.status.history import CLOSED
from lightning_diloco.syncer.status.progress import EVENT as PROGRESS
from lightning_diloco.syncer.status.progress import pause_s, progress
from lightning_diloco.syncer.status.publisher import StatusPublisher
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.base import Bulk, Json, Polled

log = logging.getLogger(__name__)

RETRY_S = 1.0
MAX_WAITING = 10_000
SHARD_S = 30.0  # a shard that does not answer must not delay the end for a longer time
MAX_SESSION_CHARS = 100


class SyncerService:
    """Implements the transport's `Handler`.

    Args:
        options: options of the process.
        run: run id, used if the run directory is new.
        durable: the opened run directory.
        followed: state machine and anchors of a standby that takes over; None restores them from disk.
        standby_key: key that a standby must send; "" refuses standbys.
        remote: shards 1, 2, ... of the run, in other processes.

    Attributes:
        replica: what this syncer knows of its standby.
    """

    def __init__(
        self,
        options: SyncerOptions,
        *,
        run: str,
        durable: SyncerStore,
        followed: tuple[SyncerState, AnchorStore] | None = None,
        standby_key: str = "",
        remote: Sequence[RemoteShard] = (),
    ) -> None:
        RunConfig.from_dict(options.run_options)
        self._options = options
        self._ending = RunEnd(expect=options.expect, embedded_by=options.embedded_by)
        self._durable = durable
        about = {"options": dict(options.run_options), "expect": options.expect, "secret": secrets.token_hex(16)}
        self.state = SyncerState(run=run, **about)
        if followed is None:
            store = durable.restore(self.state, time.monotonic())
        else:
            store = durable.take_over(self.state, *followed, time.monotonic())
        self.replica = Replica(options.run_dir, durable.log, standby_key, durable.fleets, remote)
        if durable.past.was_closed:
            self._ending.reopened()
        self._desk = Payloads(durable.part)
        self._desk.remember_merged(merged_by(self.state.roster.members.values()))
        self._own = OwnShard(self._desk, Recorder(options.run_dir / "syncer" / "contributions"))
        self._own.anchors = store
        self._remote = remote
        self._shards: list[Shard] = [self._own, *remote]
        self._board = StatusPublisher(self.state, self._desk, durable.past, self._ending, self.replica, shards=remote)
        self._merger = MergeWorker(self._shards, durable, options.record_contributions, self._board.disk_failed)
        self._outbox = Outbox(is_member=self._is_member)
        self._inbox = Inbox()
        lsn = durable.log.last_lsn
        self._announcer = Announcer(self.replica, lsn, send=self._outbox.put, install=self._publish)
        self._changes_fleet = False
        is_recorded = options.record_contributions
        self._seeding = Seeding(durable, self._desk, self._own, remote=remote, is_recorded=is_recorded)
        self._todo: deque[actions.SyncerAction] = deque()
        self._retry_s = self._next_progress_s = 0.0
        self._said: tuple[messages.FromSyncer, Json] | None = None
        self._arrivals = Arrivals(self.replica, remote, self.tell)
        if followed is None and durable.restored is not None:
            self.tell("restarted", durable.restored)
        self._num_applying = 0
        self._held_back: list[actions.Apply] = []
        self._ended = threading.Event()
        self._is_stopping = False
        self.error: BaseException | None = None
        if self.state.manifest is not None:
            self._write_manifest(self.state.manifest)
        merge = partial(self._merger.run, announce=self._announcer.commit, hear=self._inbox.put)
        run_threads = {
            "loop": self._loop,
            **{f"merge-{k}": partial(merge, k) for k in range(len(self._shards))},
            "commits": self._announcer.run_commits,
            "messages": self._announcer.run_messages,
            "clock": self._inbox.run_clock,
        }
        self._threads = {
            name: threading.Thread(target=self._guarded, args=(run_thread,), name=f"diloco-{name}", daemon=True)
            for name, run_thread in run_threads.items()
        }

    # ------------------------------------------------------------------------------------------------------- lifetime

    def start(self) -> None:
        """Start the threads. The standby has all records of the log, or has been given up; all shards are attached."""
        for shard in self._remote:
            self.state.set_digests(shard.digests)
        self.replica.fleet_is(self.state.roster.fleet())
        for thread in self._threads.values():
            thread.start()

    def attach(self) -> None:
        """Begin to attach to the shards."""
        for shard in self._remote:
            shard.start(partial(self._attachment, shard.part), self._inbox.put)

    @property
    def missing(self) -> RemoteShard | None:
        """A shard that is not attached; None if all are."""
        return next((shard for shard in self._remote if not shard.is_attached), None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the run has ended or the syncer has failed; return False after timeout_s."""
        return self._ended.wait(timeout_s)

    def stop(self) -> Json:
        """Refuse calls, finish the commits being written, and close all files.

        Returns:
            The run's summary, also written to RUN_DIR/summary.json.
        """
        self._end_threads()
        # Otherwise the state is ahead of the disk or behind it, or the disk is ahead of the standby.
        is_alive = any(thread.is_alive() for thread in self._threads.values())
        is_quiet = not is_alive and not self._announcer.has_withheld
        may_rest = self.error is None and is_quiet and not self._todo and not self.replica.lacks_records
        saved = codec.dump(self.state.saved()) if may_rest else {}
        is_finished = self.state.is_finished and self.state.ended_by_finishing and self.error is None
        self.state.finish()
        status = "finished" if is_finished else "interrupted"
        summary = self._board.summary(status)
        if self.error is None:  # after an error, the run continues when the syncer is restarted
            self._durable.note(CLOSED)
        try:
            write_whole(self._options.run_dir / "summary.json", _json(summary))
            if may_rest:
                self._rest(saved)
            self._durable.close()
        except StorageError as error:
            log.error("the end of the run is not on disk: %s", error)
        return summary

    def tell(self, event: str, fields: Mapping[str, object], late_s: float = 0.0) -> None:
        """Write an event that happened `late_s` ago to log, tape and status; by the loop thread, once it runs."""
        log.info("%s %s", event, fields)
        self._durable.note(event, late_s=late_s, **fields)
        self._board.noted(event, fields, late_s=late_s)

    def abandon(self) -> None:
        """Stop without writing anything, because another syncer serves the run now."""
        self._end_threads()
        self._durable.close()

    def _end_threads(self) -> None:
        self._is_stopping = True
        until_s = time.monotonic() + SHARD_S
        with self._board.looking:
            is_over = self.error is None and self.state.is_finished and self.state.ended_by_finishing
        self.replica.end(is_over=is_over)
        self._merger.end()
        own, *others = (thread for name, thread in self._threads.items() if name.startswith("merge-"))
        _join(own)
        for thread in others:
            _join(thread, max(0.0, until_s - time.monotonic()))
        self._announcer.end_commits()
        _join(self._threads["commits"])
        self._inbox.close()  # after the last durable commit was queued
        _join(self._threads["loop"], max(1.0, until_s - time.monotonic()) if others else None)
        _join(self._threads["clock"])
        self._announcer.end_messages()
        _join(self._threads["messages"])
        for shard in self._remote:
            shard.stop(is_over=is_over, until_s=until_s)
        self._outbox.close()

    def _rest(self, saved: Json) -> None:
        is_own = self._options.embedded_by is not None  # a script's run needs no log for a replay
        if self._store is not None and self.state.manifest is not None:
            self._durable.rest(saved, self.state.manifest, self._store, keeps_log=not is_own)

    def _guarded(self, run_thread: Any) -> None:
        """Run the function of a thread. If it raises an error, the process ends with this error."""
        try:
            run_thread()
        except BaseException as error:
            log.exception("the syncer stops")
            self.error = error
            self._ended.set()

    # -------------------------------------------------------------------------------------------- called by transport

    def on_send(self, session: str, messages_: Sequence[Json]) -> Json:
        """Queue control messages for the state machine; return the news."""
        self._check_open(_checked(session), len(messages_))
        with self._places(session, messages_) as places:
            decoded = [messages.decode(message, messages.FromLearner) for message in messages_]
        for message, place in zip(decoded, places, strict=True):
            self._inbox.put(events.FromALearner(session, cast("messages.FromLearner", message)), place)
        self.heard(session)
        return codec.dump(self._board.news(session))

    def on_poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        """Return the messages that wait for a session."""
        self._ending.contacted()
        if self._is_member(_checked(session)):  # ignore unknown session ids
            self._ending.polled(session)
        polled = self._outbox.poll(session, cursor, wait_s)
        if not self.replica.may_announce or (self._is_stopping and not polled.messages):
            raise _stopping()
        self.heard(session)
        return polled

    def on_put(self, bulk: Bulk) -> Json:
        """Accept a contribution or a part of the seed; discard bytes that only measure a link."""
        session = self._enter(bulk.header)
        if bulk.header.get("what") == "probe":
            return {"missing": []}
        if bulk.header.get("what") == "seed":
            if self._store is not None:  # the run already has its start values
                return {"missing": []}
            return {"missing": self._desk.take_seed(session, bulk, self.state.seed_grant)}
        with self._places(session, [bulk.header]) as (place,):
            event, missing = self._desk.take_contribution(session, bulk, self._store, self.state)
        if event is None:  # parts are missing
            self._inbox.quota.free(place)
        else:
            self._inbox.put(event, place)
        return {"missing": missing}

    def on_get(self, header: Json) -> Bulk:
        """Return the update that a learner needs, a portion of it, or bytes that measure a link."""
        if header.get("what") == STANDBY:
            return self.replica.on_get(header)
        session = self._enter(header)
        if header.get("what") == "probe":
            return made_up(header)
        if not self.replica.may_announce:
            raise _stopping()
        is_known = self._is_member(session)
        return self._desk.give(session, header, self._store, is_known=is_known, proof=self.state.proof)

    def on_status(self) -> Json:
        """Return the status of the run, with the protocol version and clock that `diloco doctor` compares."""
        return {**self._board.status(), "protocol": PROTOCOL_VERSION, "clock_s": time.time()}

    def _enter(self, header: Json) -> str:
        """Check the session of a bulk transfer, and note that it is alive."""
        session = _checked(header.get("session"))
        self._check_open(session)
        return session

    def heard(self, session: str | None) -> None:
        """Note that a learner is in contact with this syncer, for the rules about the standby."""
        if session is not None and self._is_member(session):
            self.replica.heard(session)

    def _is_member(self, session: str) -> bool:
        return self.state.roster.get(session) is not None

    def _places(self, session: str, messages_: Sequence[Json]) -> AbstractContextManager[list[Place]]:
        return self._inbox.quota.places(session, messages_, is_member=self._is_member(session))

    def _check_open(self, session: str, num_events: int = 1) -> None:
        if self._is_member(session):
            self._inbox.heard(session)  # the session is alive, even if the call is refused
        if self._is_stopping:
            raise _stopping()
        if (waiting := num_events + self._inbox.num_waiting + len(self._todo)) > MAX_WAITING:
            raise TransportError(
                f"{waiting} events for the syncer; at most {MAX_WAITING} may wait; nothing of this was used; try again"
            )
        self._ending.contacted()

    # ----------------------------------------------------------------------------------------------------- loop thread

    def _loop(self) -> None:
        while (taken := self._inbox.take()) is not None:
            came_s, event = taken
            match event:
                case DurableCommit():
                    self._install(event, came_s)
                case events.Tick():
                    self._tick(event, came_s)
                case events.StoodStill():
                    log.warning("this process was suspended for %.1f s; all leases are renewed", event.for_s)
                    self._ending.stood_still()
                    self._handle(event, came_s)
                case _:
                    self._num_applying -= isinstance(event, events.CommitFailed)
                    self._handle(event, came_s)

    def _tick(self, tick: events.Tick, now_s: float) -> None:
        self._handle(tick, now_s)
        self._desk.prune(self.state)
        self._board.refresh()
        self._arrivals.look()
        self._note_progress(now_s)
        self._store_seed(now_s)
        if self._ending.has_come(self.state, now_s):
            self._ended.set()

    def _note_progress(self, now_s: float) -> None:
        if self.state.manifest is not None and now_s >= self._next_progress_s:
            self._next_progress_s = now_s + pause_s(self._board.age_s())
            self._durable.note(PROGRESS, **progress(self._board.status()))

    def _handle(self, event: events.SyncerEvent, now_s: float) -> None:
        with self._board.looking:
            todo = self.state.handle(event, now_s)
            if self._remote:
                now = admitted(self.state)
                for shard in self._remote:
                    shard.admit(now)
        written = [action.values for action in todo if isinstance(action, actions.Record)]
        if any(record["kind"] not in IN_FLIGHT for record in written):
            self._changes_fleet = True
            self.replica.fleet_changes_to(self.state.roster.fleet(), set[str]().union(*map(changed_by, written)))
        self._do([replace(action, at_s=now_s) if isinstance(action, actions.Note) else action for action in todo])

    def _do(self, todo: Sequence[actions.SyncerAction]) -> None:
        """Carry out actions in order; if the disk fails to write a record, all later actions wait."""
        is_blocked = bool(self._todo)
        self._todo.extend(action for action in todo if not (is_blocked and self._comes_again(action)))
        while self._todo and self.replica.may_announce and time.monotonic() >= self._retry_s:
            try:
                self._carry_out(self._todo[0])
            except StorageError as error:
                self._retry_s = time.monotonic() + RETRY_S
                self._board.disk_failed(str(error))
                return
            self._todo.popleft()
        if not self._todo and self.replica.may_announce:
            if self._changes_fleet:
                self._changes_fleet = False
                self.replica.fleet_is(self.state.roster.fleet())
            self._snapshot_if_quiet()

    def _attachment(self, part: tuple[int, int]) -> Attach:
        """Return a shard's `Attach` request, when learners may have all decided versions. A thread of the shard.

        Raises:
            ShardError: another syncer serves the run, or this one has stopped.
        """
        self.replica.wait(self._durable.log.durable_lsn)
        if not self.replica.may_announce:
            raise ShardError("the standby lacks versions that this shard would give to learners")
        with self._board.looking:
            return attachment(self.state, part)

    def _comes_again(self, action: actions.SyncerAction) -> bool:
        """Return whether an action can be dropped while the disk fails, because it will be repeated."""
        match action:
            case actions.Send():
                return isinstance(action.message, (messages.Announce, messages.RunIs)) or action in self._todo
            case actions.Note():
                return action.event == "abort"
        return False

    def _carry_out(self, action: actions.SyncerAction) -> None:
        match action:
            case actions.Record():
                lsn = self._durable.write(action.values)
                self._announcer.wrote(lsn)
                self._board.disk_works()
                if action.values["kind"] not in IN_FLIGHT:
                    self.replica.wait(lsn)
                if action.values["kind"] == records.Regenerated.__name__:
                    for shard in self._shards:
                        shard.regenerate(self.state.rounds.generation)
            case actions.Send():
                if self._said is None or self._said[0] is not action.message:  # encode a message to all learners once
                    self._said = action.message, messages.encode(action.message)
                self._announcer.send(action.session, self._said[1])
            case actions.Merge():
                self._merger.put(action)
            case actions.Apply():
                self._held_back.append(action)  # `_snapshot_if_quiet` may start a snapshot first
            case actions.DropPayload():
                self._merger.shard_of(action.fragment).drop(action)
            case actions.StoreSeed():
                self._seeding.begin(action)
            case actions.Note():
                self.tell(action.event, action.fields, late_s=time.monotonic() - action.at_s)

    def _snapshot_if_quiet(self) -> None:
        """Start a snapshot if one is due and no commit is being written; otherwise start the waiting commits."""
        store, manifest = self._store, self.state.manifest
        if not self._held_back or store is None or manifest is None:
            return
        if self._durable.is_snapshot_due(store):
            if self._num_applying:
                return
            saved = codec.dump(self.state.saved())
            self._durable.begin_snapshot(saved, manifest, store, before_drop=self.replica.wait)
        held_back, self._held_back = self._held_back, []
        for action in held_back:
            self._num_applying += 1
            self._merger.put(action)

    def _install(self, made: DurableCommit, now_s: float) -> None:
        p, found = made.event.fragment, made.report
        steps = tuple(c.steps for c in made.contributions)
        learners = tuple(c.learner for c in made.contributions)
        self._durable.past.usual.learn(p, learners, found.norms, steps, found.kept)
        self._board.merged(tuple(c.session for c in made.contributions), found.cosines)
        lengths = {"merged_norm": found.merged_norm, "norms": found.norms, "kept": found.kept, "cosines": found.cosines}
        whose = {"learners": learners, "steps": steps, "lr": made.prepared.lr}
        self._durable.note("outer", fragment=p, version=made.action.commit.version, **whose, **lengths)
        self._num_applying -= 1
        self._board.disk_works()
        self._handle(made.event, now_s)

    # --------------------------------------------------------------------------------------------------------- start

    def _store_seed(self, now_s: float) -> None:
        """Make the start values the anchors at version 0, if all of them have arrived."""
        if not self._todo and time.monotonic() >= self._retry_s:
            self._seeding.attempt(self.state, partial(self._seed_stored, now_s=now_s))

    def _seed_stored(self, event: events.SeedStored, now_s: float) -> None:
        if event.error is None:
            self._board.disk_works()
        elif not event.is_refused:
            self._retry_s = time.monotonic() + RETRY_S
            self._board.disk_failed(event.error)
        self._handle(event, now_s)
        if event.error is None and self.state.manifest is not None:
            self._write_manifest(self.state.manifest)

    def _write_manifest(self, manifest: Json) -> None:
        try:
            write_whole(self._options.run_dir / "manifest.json", _json(manifest_file(manifest)))
        except StorageError as error:  # only a copy for users; the log is authoritative
            log.warning("%s", error)

    # -------------------------------------------------------------------------------------------------- commits thread

    def _publish(self, made: DurableCommit) -> None:
        self._merger.shard_of(made.event.fragment).install(made.action.commit, made.prepared)
        self._inbox.put(made)

    @property
    def _store(self) -> AnchorStore | None:
        return self._own.anchors


def _checked(session: object) -> str:
    """Check that a session id is a short text."""
    if not isinstance(session, str) or len(session) > MAX_SESSION_CHARS:
        raise CorruptMessageError(
            f"session={session!r:.80}; must be a text of at most {MAX_SESSION_CHARS} characters; nothing was used; do "
            "both sides run the same version?"
        )
    return session


def _stopping() -> TransportError:
    return TransportError("the syncer is stopping; nothing of the call was used; try again")


def _join(thread: threading.Thread, timeout_s: float | None = None) -> None:
    if thread.ident is not None:
        thread.join(timeout_s)


def _json(values: Json) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"
