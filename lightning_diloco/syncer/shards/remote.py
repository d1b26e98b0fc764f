"""A shard in another process, from the view of its syncer.

1. A thread attaches to the shard and polls for its events. If a call fails, it attaches again, as soon as the shard can
   be reached. The state machine then gets `PayloadsLost`, and the learners upload again.
2. A second thread sends the syncer's admissions and drops in order. They are not needed while the shard is detached,
   because `Attach` has everything.
3. Between `prepare` and `decided`, the thread does not attach. Otherwise the shard would drop a version that the run's
   log is about to get.
4. A drop of a payload that a merge needs waits until the shard has measured it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
from msgspec.structs import replace

from lightning_diloco.core.buffers import tensor_of
from lightning_diloco.core.encoded import Measured
from lightning_diloco.core.merge import MergeReport
from lightning_diloco.errors import DiLoCoError, NonFiniteError, RemoteError, ShardError
from lightning_diloco.process.retry import problem_of
from lightning_diloco.protocol import actions, codec, events, messages
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.protocol.syncer.records import CommitRecord
from lightning_diloco.syncer.anchors import fragments_of
from lightning_diloco.syncer.payloads import merged_by
from lightning_diloco.syncer.shards import requests as ask
from lightning_diloco.syncer.shards.shard import MergeJob, Outcome, Prepared
from lightning_diloco.transport.base import RESET, Bulk, Connection, Json

log = logging.getLogger(__name__)

CALL_S = 10.0
COMPUTE_S = 600.0
POLL_S = 2.0
AGAIN_S = 0.2


class RemoteShard:
    """A `Shard` in another process.

    Args:
        part: (shard, number of shards).
        address: returns `host:port` for learners; without a host, the host is the syncer's.
        connect: makes a connection.
        key: key of the shard.

    Attributes:
        connect, key: as given.
        following: name under which this shard follows that of a primary, until it is attached.
        address: `host:port` for learners at the last `Attach`; without a host, it is the syncer's; "" if unknown.
        digests: digests of its fragments at the last `Attach`.
        is_over: whether it was told that the run has finished.
        pid: its process, on its machine.
        bytes_up, bytes_down: payload bytes that it has received and sent since this syncer began, as of the last event.
    """

    def __init__(
        self, part: tuple[int, int], *, address: Callable[[], str], connect: Callable[[], Connection], key: str
    ) -> None:
        self.part = part
        self._find_address, self.connect, self.key = address, connect, key
        self.following = secrets.token_hex(8)
        self._connection: Connection | None = None
        self._nonce = ""
        self._attaching = threading.RLock()
        self._attached, self._away_since_s = threading.Event(), time.monotonic()
        self._is_stopping = threading.Event()
        self._decided: dict[int, CommitRecord] = {}
        self._commands: queue.SimpleQueue[ask.Request | None] = queue.SimpleQueue()
        self._admitted: ask.Admitted | None = None
        self._generation: int | None = None
        self._in_use: dict[int, set[tuple[str, int]]] = {}
        self._later: dict[int, list[actions.DropPayload]] = {}
        self._dropping = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.address = ""
        self.digests: dict[int, str] = {}
        self.is_over = False
        self.pid: int | None = None
        self.bytes_up = self.bytes_down = 0
        self._counted: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"shard {self.part[0]} of {self.part[1]}"

    @property
    def is_attached(self) -> bool:
        """Whether the shard works."""
        return self._attached.is_set()

    @property
    def place(self) -> str:
        """See `address`; before the shard is attached, the address at which it listens, if known."""
        return self.address or self._find_address()

    def status(self) -> Json:
        """Return the part of the run's status about this shard."""
        away_s = None if self.is_attached else time.monotonic() - self._away_since_s
        where = {"shard": self.part[0], "address": self.address, "pid": self.pid}
        return {**where, "away_s": away_s, "bytes_up": self.bytes_up, "bytes_down": self.bytes_down}

    def start(self, attach: Callable[[], ask.Attach], hear: Callable[[events.SyncerEvent], object]) -> None:
        """Start to attach.

        Args:
            attach: returns the `Attach` request without its nonce; called in a thread.
            hear: called with events for the state machine.
        """
        self._say, self._hear = attach, hear
        for run in (self._link, self._command):
            thread = threading.Thread(target=run, name=f"diloco-shard-{self.part[0]}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, *, is_over: bool, until_s: float) -> None:
        """End the threads. A call that the shard does not answer is abandoned.

        Args:
            is_over: the run has finished, so the shard ends, too.
            until_s: time (monotonic) after which a thread is not waited for.
        """
        if is_over:
            self.is_over = True
            with contextlib.suppress(ShardError):
                self._call(ask.Over(), min(CALL_S, max(1.0, until_s - time.monotonic())))
        self._attached.clear()
        self._commands.put(None)
        self._is_stopping.set()
        if self._connection is not None:
            self._connection.close()
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    # --------------------------------------------------------------------------------------------------------- threads

    def _link(self) -> None:
        said, has_worked = "", False
        while not self._is_stopping.is_set():
            try:
                nonce = self._attach()
                log.log(logging.WARNING if has_worked else logging.INFO, "%s is attached", self.name)
                said, has_worked = "", True
                self._hear(events.PayloadsLost(tuple(self.digests)))
                self._poll(nonce)
            except DiLoCoError as error:
                if self._is_stopping.is_set():
                    return
                self.reattach()
                if problem_of(error) != said:
                    said = problem_of(error)
                    level = logging.WARNING if has_worked else logging.INFO  # at first it is still starting
                    level = level if isinstance(error, RemoteError) else logging.ERROR
                    what = "does not work, its fragments wait for it" if has_worked else "does not answer yet"
                    log.log(level, "%s %s: %s", self.name, what, error)
                self._is_stopping.wait(AGAIN_S)

    def _attach(self) -> str:
        with self._attaching:
            if self._connection is not None:
                self._connection.close()
            self._connection = self.connect()
            request = self._with_decided(self._say())
            answer = self._ask(request, deadline_s=COMPUTE_S).header
            self._nonce, self.address = request.nonce, self._find_address()
            self.digests = {int(p): digest for p, digest in answer["digests"].items()}
            with self._dropping:
                self._in_use.clear()
                self._later.clear()
            self._attached.set()
        # The loop thread may have sent a newer message meanwhile.
        if self._admitted is not None:
            self._commands.put(ask.Admit(self._admitted))
        if self._generation is not None:
            self._commands.put(ask.Regenerate(self._generation))
        return request.nonce

    def _with_decided(self, said: ask.Attach) -> ask.Attach:
        """Add a nonce, and commits that are in the log but not yet applied by the state machine."""
        positions, merged = said.positions, said.merged
        for p, commit in self._decided.items():
            at = next((each for each in positions or () if each.fragment == p), None)
            if at is not None and at.generation == commit.generation and at.version < commit.version:
                new = ask.Position(p, commit.generation, commit.version)
                positions = tuple(new if each is at else each for each in positions or ())
                merged = (*merged, *((m.session, p, m.ready.seq, commit.version, m.kept) for m in commit.merges))
        own = {"nonce": secrets.token_hex(16), "following": self.following}
        return replace(said, **own, positions=positions, merged=merged)

    def _poll(self, nonce: str) -> None:
        assert self._connection is not None
        cursor = 0
        while not self._is_stopping.is_set() and self.is_attached and self._nonce == nonce:
            polled = self._connection.poll(nonce, cursor, POLL_S)
            if RESET in polled.messages and cursor:
                raise ShardError(f"{self.name} has lost events")
            cursor = polled.cursor
            self._count()
            for told in polled.messages:
                if told != RESET:
                    self._hear_of(told)

    def _count(self) -> None:
        """Add the bytes since the last count; those from before this syncer began are on its tape."""
        figures = self._call(ask.Figures(), CALL_S).header
        self.pid, now = figures["pid"], (figures["bytes_up"], figures["bytes_down"])
        if self._counted is not None:
            is_new = any(a < b for a, b in zip(now, self._counted, strict=True))  # the process was restarted
            up, down = (0, 0) if is_new else self._counted
            self.bytes_up += now[0] - up
            self.bytes_down += now[1] - down
        self._counted = now

    def _hear_of(self, told: Json) -> None:
        ready = messages.decode({**told["ready"], "kind": messages.Ready.__name__}, messages.FromLearner)
        self._hear(events.PayloadReceived(told["session"], cast("messages.Ready", ready), told["error"]))

    def _command(self) -> None:
        while (request := self._commands.get()) is not None:
            try:
                self._call(request, CALL_S)
            except ShardError:
                pass  # sent when it attaches again
            except DiLoCoError as error:
                log.error("%s: %s", self.name, error)
                self.reattach()

    # ----------------------------------------------------------------------------------------------------------- calls

    def _call(self, request: ask.Request, deadline_s: float = COMPUTE_S) -> Bulk:
        """Ask the attached shard.

        Raises:
            ShardError: it is away.
        """
        if not self.is_attached:
            raise ShardError(f"{self.name} is away")
        nonce = self._nonce
        try:
            return self._ask(request, deadline_s=deadline_s)
        except RemoteError as error:
            if self._nonce == nonce:
                self.reattach()
            raise ShardError(f"{self.name}: {error}") from error

    def _ask(self, request: ask.Request, *, deadline_s: float) -> Bulk:
        assert self._connection is not None
        return self._connection.get(ask.header(self.key, request, self._nonce), deadline_s=deadline_s)

    def reattach(self) -> None:
        """Make the thread attach again, because the shard may have a version that the run does not have."""
        if self.is_attached:
            self._away_since_s = time.monotonic()
            self._attached.clear()

    def admit(self, admitted: ask.Admitted) -> None:
        """Send the sessions that may upload, if they have changed. Loop thread."""
        if admitted != self._admitted:
            self._admitted = admitted
            self._commands.put(ask.Admit(admitted))

    def size_of_seed(self, session: str, lease: int, num_fragments: int) -> int | None:
        """Return the number of start values here; None until all have arrived."""
        answer = self._call(ask.SizeOfSeed(session, lease, num_fragments), CALL_S).header
        return None if answer["num_values"] is None else int(answer["num_values"])

    def store_seed(self, request: ask.StoreSeed) -> dict[int, str]:
        """Make the start values durable; return their digests by fragment. See `seeded_store` for errors."""
        digests = self._call(request).header["digests"]
        return {int(p): digest for p, digest in digests.items()}

    # ----------------------------------------------------------------------------------------------------- see `Shard`

    def job(self, action: actions.Merge) -> MergeJob:
        """See `Shard`."""
        with self._dropping:
            self._in_use[action.fragment] = {
                (c.session, c.ready.seq) for c in (*action.contributions, *action.on_trial)
            }
        return MergeJob(action)

    def measure(self, job: MergeJob) -> Measured:
        """See `Shard`."""
        action = job.action
        wanted = tuple((c.session, c.ready.seq) for c in (*action.contributions, *action.on_trial))
        try:
            found = self._call(ask.Measure(action.fragment, wanted))
        finally:
            self._release(action.fragment)  # the shard keeps the measured contributions
        return Measured(tensor_of(found.payload, torch.float64).reshape(found.header["shape"]))

    def merge(self, job: MergeJob, max_norms: Sequence[float], measured: Measured) -> Outcome:
        """See `Shard`."""
        action = job.action
        request = ask.Merge(action.fragment, action.round, action.shares, ask.numbers(max_norms))
        found = codec.load(ask.Merged, self._call(request).header)
        norms, kept, cosines = (ask.floats(values) for values in (found.norms, found.kept, found.cosines))
        return Outcome(MergeReport(norms, kept, cosines, float(found.merged_norm)), found.is_finite)

    def deciding(self) -> AbstractContextManager[object]:
        """See `Shard`. If the block fails, the shard may have a version that the run does not have: attach again."""

        @contextlib.contextmanager
        def decide() -> Iterator[None]:
            with self._attaching:
                try:
                    yield
                except NonFiniteError:  # nothing was prepared
                    raise
                except BaseException:
                    self.reattach()
                    raise

        return decide()

    def prepare(self, commit: CommitRecord, recording: ask.Recording | None) -> Prepared:
        """See `Shard`."""
        answer = self._call(ask.Prepare(_without_data(commit), recording)).header
        return Prepared(answer["lr"], answer["digest"], lsn=answer["lsn"])

    def decided(self, commit: CommitRecord) -> None:
        """See `Shard`."""
        self._decided[commit.fragment] = commit

    def install(self, commit: CommitRecord, prepared: Prepared) -> None:
        """See `Shard`. If the shard is away, it installs this version when it attaches again."""
        with contextlib.suppress(ShardError):
            self._call(ask.Install(_without_data(commit)), CALL_S)

    def _release(self, p: int) -> None:
        """Send the drops that have waited for a merge."""
        with self._dropping:
            self._in_use.pop(p, None)
            later = self._later.pop(p, [])
        for action in later:
            self.drop(action)

    def drop(self, action: actions.DropPayload) -> None:
        """See `Shard`."""
        with self._dropping:
            if (action.session, action.seq) in self._in_use.get(action.fragment, ()):
                self._later.setdefault(action.fragment, []).append(action)
                return
        self._commands.put(ask.Drop(action.session, action.fragment, action.seq))

    def regenerate(self, generation: int) -> None:
        """See `Shard`."""
        self._generation = generation
        self._commands.put(ask.Regenerate(generation))


def _without_data(commit: CommitRecord) -> CommitRecord:
    """Return a commit without the leased data of its contributions, which may be long."""
    merges = tuple(replace(m, ready=replace(m.ready, spans=(), repeats=())) for m in commit.merges)
    return replace(commit, merges=merges)


def admitted(state: SyncerState) -> ask.Admitted:
    """Return who may upload."""
    members = state.roster.in_state("joining", "confirmed", "active")
    return ask.Admitted(tuple(member.session for member in members), state.seed_grant)


def attachment(state: SyncerState, part: tuple[int, int]) -> ask.Attach:
    """Return what a shard must know, without a nonce.

    Args:
        state: the state machine, which no other thread changes meanwhile.
        part: (shard, number of shards).
    """
    fragments, generation = state.rounds.fragments, state.rounds.generation
    mine = fragments_of(part, len(fragments))
    positions = None
    if state.manifest is not None:
        of_mine = [(p, fragments[p]) for p in mine]
        positions = tuple(ask.Position(p, generation, f.version, f.digests.get(f.version, "")) for p, f in of_mine)
    merged = tuple(each for each in merged_by(state.roster.in_state("active")) if each[1] in mine)
    return ask.Attach("", state.run, *part, state.secret, positions, merged, admitted(state))
