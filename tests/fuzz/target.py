"""A syncer to be attacked, and an honest learner whose contributions must each be merged exactly once."""

from __future__ import annotations

import gc
import itertools
import json
import secrets
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.config import PROTOCOL_VERSION, is_learner_id
from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.core.quantize import encode, wire_nbytes
from lightning_diloco.manifest import ModelDescription, make_manifest, plan_of
from lightning_diloco.protocol import messages
from lightning_diloco.syncer.process import SyncerOptions, SyncerService
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.base import Bulk, Connection, Handler, Json
from lightning_diloco.transport.failures import handling
from lightning_diloco.transport.frames import dumps, loads
from tests.transport.memory import MemoryTransport

NUM_FRAGMENTS = 2
TOKENS = 64
STEPS = 4
STEP_S = 0.01
WAIT_S = 20.0
MAX_SAID = 40
MODEL = ModelDescription({"a": (8, 8), "b": (64,)}, frozenset(), {}, "tokens")
OPTIONS = {"sync_every": 8, "num_fragments": NUM_FRAGMENTS, "block_size": 16, "lease_s": 3600.0}


class Peer:
    """A process that sends and receives the messages that a test needs.

    Args:
        connection: its connection.
        learner: its learner id.

    Attributes:
        model, options: those of the run, if this process seeds it.
        wait_s: time limit of the wait for a message.
    """

    model: ModelDescription = MODEL
    options: Mapping[str, Any] = OPTIONS
    wait_s = WAIT_S

    def __init__(self, connection: Connection, learner: str) -> None:
        self.connection = connection
        self.learner = learner
        self.session = secrets.token_hex(16)
        self._cursor = 0
        self._heard: list[messages.FromSyncer] = []

    def say(self, *said: messages.FromLearner) -> None:
        self.connection.send(self.session, [messages.encode(message) for message in said])

    def hear(self, kind: Any, again: messages.FromLearner | None = None, **wanted: Any) -> Any:
        """Wait for a message with these fields, sending `again` from time to time; earlier messages are dropped."""
        until_s = time.monotonic() + self.wait_s
        while time.monotonic() < until_s:
            while self._heard:
                message = self._heard.pop(0)
                if isinstance(message, kind) and all(getattr(message, k) == v for k, v in wanted.items()):
                    return message
            polled = self.connection.poll(self.session, self._cursor, 0.05)
            self._cursor = polled.cursor
            told = [values for values in polled.messages if values["kind"] != "Reset"]
            self._heard += [messages.decode(values, messages.FromSyncer) for values in told]
            if again is not None and not told:
                self.say(again)
        raise AssertionError(f"{self.learner} waited {self.wait_s:.0f} s for {kind} {wanted}")

    def join(self) -> messages.Welcome:
        """Join the run; seed it if it is empty."""
        hello = messages.Hello(self.learner, 1, PROTOCOL_VERSION, {})
        self.say(hello)
        answer = self.hear((messages.Welcome, messages.SeedGrant))
        if isinstance(answer, messages.SeedGrant):
            manifest, plan = make_manifest(self.model, {**answer.options, **self.options})
            config = plan_of(manifest)[1]
            for p in range(plan.num_fragments):
                header: Json = {"what": "seed", "session": self.session, "lease": answer.lease, "fragment": p}
                values = torch.linspace(-1.0, 1.0, plan.layout(p, config.block_size).padded_numel)
                self.connection.put(Bulk(header, bytes_of(values)), deadline_s=self.wait_s)
            self.say(messages.SeedPlan(answer.lease, manifest), hello)
            answer = self.hear(messages.Welcome)
        plan, _ = plan_of(answer.manifest)
        self.say(messages.Confirm(answer.incarnation, plan.digest, {}, "tokens"))
        self.hear(messages.Active)
        return answer


class Honest(Peer):
    """Contributes to every fragment in turn, and keeps its own token accounts for the check."""

    def __init__(self, connection: Connection, learner: str = "honest") -> None:
        super().__init__(connection, learner)
        self.tokens = self.start = self.step = self.generation = 0
        self.versions = [0] * NUM_FRAGMENTS
        self.scale = 1.0
        self.said: list[messages.FromLearner | Bulk] = []
        self._seqs = itertools.count(1)

    def join(self) -> messages.Welcome:
        welcome = super().join()
        self.plan, self.config = plan_of(welcome.manifest)
        self.versions = list(welcome.versions)
        return welcome

    def train(self) -> None:
        """Make STEPS steps, then contribute to each fragment; each contribution is merged before the next one."""
        start, self.tokens, self.step = self.start, self.tokens + TOKENS, self.step + STEPS
        for p in range(NUM_FRAGMENTS):
            while not self._contribute(p, start):
                pass
        self.start = self.tokens
        heartbeat = messages.Heartbeat("stepping", self.progress(), STEP_S, 1e3)
        self.say(heartbeat)
        self.said = [*self.said, heartbeat][-MAX_SAID:]

    def _contribute(self, p: int, start: int) -> bool:
        """Return whether it was merged; False: a new generation began, and it must be sent again."""
        intent = messages.Intent(p, STEP_S)
        self.say(intent)
        if not self._is_told(messages.Announce, intent, p):
            return False
        ready = messages.Ready(p, next(self._seqs), self.versions[p], self.generation, start, self.tokens, STEPS)
        bulk = Bulk({"session": self.session, "ready": message_fields(ready)}, bytes_of(self.payload(p)))
        self.say(ready)
        self.connection.put(bulk, deadline_s=5.0)
        self.said += [intent, ready, bulk]
        commit = self._is_told(messages.Commit, intent, p)
        if commit is not None:
            named = {(c.learner, c.seq) for c in commit.contributors}
            assert named == {(self.learner, ready.seq)}, f"committed was {commit}"
            self.versions[p] = commit.version
        return commit is not None

    def _is_told(self, kind: type, again: messages.FromLearner, p: int) -> Any:
        """Wait for this message about the fragment; return None if a new generation began."""
        while True:
            heard = self.hear((kind, messages.Welcome), again)
            if isinstance(heard, kind):
                if heard.fragment == p:
                    return heard
            elif heard.generations[0] > self.generation:
                self.generation, self.versions = heard.generations[0], list(heard.versions)
                return None

    def replay(self, number: int) -> None:
        """Send earlier messages again, as a network may do."""
        if self.said:
            again = self.said[number % len(self.said)]
            if isinstance(again, Bulk):
                self.connection.put(again, deadline_s=5.0)
            else:
                self.say(again)

    def payload(self, p: int) -> Tensor:
        x = self.scale * torch.linspace(-1e-3, 1e-3, self.plan.layout(p, self.config.block_size).padded_numel)
        return encode(x, wire=self.config.wire, block_size=self.config.block_size, name="x")

    def payload_nbytes(self, p: int) -> int:
        padded_numel = self.plan.layout(p, self.config.block_size).padded_numel
        return wire_nbytes(padded_numel, self.config.wire, self.config.block_size)

    def progress(self) -> messages.Progress:
        nothing = ((),) * NUM_FRAGMENTS
        return messages.Progress(self.step, self.tokens, tuple(self.versions), nothing, {}, self.generation)

    def leave(self) -> None:
        self.say(messages.Leave("finished", self.progress(), 1e3))
        self.hear(messages.LeaveNoted)


class Wire:
    """A peer that sends arbitrary encodings to a handler; implements the calls of `Connection`.

    Args:
        handler: the syncer's side.
        reported: receives errors of the handler, but not those of the peer.
    """

    def __init__(self, handler: Handler, reported: list[Exception]) -> None:
        self._handler = handler
        self._reported = reported

    def send(self, session: Any, messages: Any) -> None:
        body = self._arrived({"session": session, "messages": messages})
        self._answered(lambda: self._handler.on_send(body["session"], body["messages"]))

    def put(self, header: Any, payload: bytes) -> None:
        bulk = Bulk(self._arrived(header), memoryview(payload))
        self._answered(lambda: self._handler.on_put(bulk))

    def get(self, header: Any) -> None:
        asked = self._arrived(header)
        self._answered(lambda: self._handler.on_get(asked).header)

    def poll(self, session: Any, cursor: int) -> None:
        body = self._arrived({"session": session, "cursor": cursor})
        self._answered(lambda: {"messages": list(self._handler.on_poll(body["session"], body["cursor"], 0.0).messages)})

    def status(self) -> None:
        self._answered(self._handler.on_status)

    def _arrived(self, value: Any) -> Any:
        return loads(json.dumps(value).encode())

    def _answered(self, call: Callable[[], Json]) -> None:
        with handling(self._reported.append):
            dumps(call())


class Target:
    """A running syncer with an honest learner; `check` verifies that it still works."""

    def __init__(self, run_dir: Path, *, durable: SyncerStore | None = None) -> None:
        self.service = SyncerService(SyncerOptions(run_dir=run_dir), run="run", durable=durable or SyncerStore(run_dir))
        self.reported: list[Exception] = []
        self.transport = MemoryTransport(self.service, on_error=self.reported.append)
        self.wire = Wire(self.service, self.reported)
        self.service.start()
        self.honest = Honest(self.transport.connect())
        self.honest.join()
        self.mallory = self.admit_mallory()
        self.seqs = itertools.count(1)
        self.num_threads = threading.active_count()

    def admit_mallory(self) -> Peer:
        """Join an authenticated learner that will send arbitrary messages."""
        mallory = Peer(self.transport.connect(), "mallory")
        mallory.join()
        return mallory

    def is_mallory_in(self) -> bool:
        member = self.service.state.roster.get(self.mallory.session)
        return member is not None and member.state == "active"

    def settle(self) -> None:
        """Return when all messages so far have been processed; messages of one learner are processed in order."""
        self.honest.say(messages.AskFate(0, 0))
        self.honest.hear(messages.FateIs, fragment=0, seq=0)

    def check(self) -> None:
        """Check that the honest learner continues, and that invalid messages had no effect."""
        assert self.service.error is None
        assert self.reported == []
        self.wire.status()
        self.honest.train()
        self.settle()
        state = self.service.state
        accounts = state.ledger.accounts
        assert accounts["honest", 1].num_merged == self.honest.tokens * NUM_FRAGMENTS
        assert sum(a.num_merged for a in accounts.values()) == self.honest.tokens * NUM_FRAGMENTS
        assert [f.version for f in state.rounds.fragments] == self.honest.versions
        assert state.rounds.generation == self.honest.generation
        assert all(is_learner_id(member.learner) for member in state.roster.members.values())
        assert threading.active_count() <= self.num_threads

    def stop(self) -> Json:
        self.honest.leave()
        return self.service.stop()


def message_fields(message: messages.FromLearner) -> Json:
    """Return the fields of a message without its kind, as in a bulk header."""
    return {name: value for name, value in messages.encode(message).items() if name != "kind"}


def held_bytes(root: object) -> int:
    """Return the memory of all objects that can be reached from an object, without code and threads."""
    seen: set[int] = set()
    waiting, total = [root], 0
    while waiting:
        held = waiting.pop()
        if id(held) in seen or isinstance(held, type | types.ModuleType | types.FunctionType | threading.Thread):
            continue
        seen.add(id(held))
        total += sys.getsizeof(held) + (held.nbytes if isinstance(held, Tensor) else 0)
        waiting += gc.get_referents(held)
    return total
