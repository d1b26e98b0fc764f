"""A syncer and learners in one process: the real service, links and devices, over the in-memory transport.

The model is a dictionary of parameters. Training pulls them towards a target that differs between learners. Tests wait
for conditions only, each with a deadline. A step takes PACE_S, so that rounds can keep up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.config import LearnerConfig
from lightning_diloco.core.digest import digest
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.errors import TransportError
from lightning_diloco.learner.link import Link
from lightning_diloco.learner.member import Member
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.storage.files import no_faults
from lightning_diloco.syncer.anchors import AnchorStore
from lightning_diloco.syncer.options import SyncerOptions
from lightning_diloco.syncer.service import SyncerService
from lightning_diloco.syncer.shards.layout import directory_of
from lightning_diloco.syncer.shards.remote import RemoteShard
from lightning_diloco.syncer.shards.resharding import settle_num_shards
from lightning_diloco.syncer.shards.service import ShardService
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk, Connection, Json
from tests.storage.faults import Crash
from tests.transport.memory import MemoryConnection, MemoryTransport

RUN = "toy"
JOIN = f"diloco://127.0.0.1:1/{RUN}#token," + "0" * 64
KEY = "key of the shards"
SHAPES = {"embedding": (24, 8), "hidden": (16, 12), "bias": (16,)}
OPTIONS = {"sync_every": 6, "num_fragments": 3, "overlap": 2, "block_size": 16, "lease_s": 3.0}
TOKENS = 7
PACE_S = 0.002
DEADLINE_S = 20.0


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until a condition holds; fail after DEADLINE_S."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"still waiting for: {what}"
        time.sleep(PACE_S)


def assert_exact(summary: Json) -> None:
    """Check that the ledger balances, with no term derived from the others."""
    discarded = sum(summary["tokens_discarded"].values())
    assert summary["tokens_seen"] == summary["tokens_merged"] + discarded + summary["tokens_pending"]
    assert summary["ledger_exact"]


def finish(*learners: Learner) -> None:
    """Tell all learners to finish, then wait for their ends."""
    for learner in learners:
        learner.enough()
    for learner in learners:
        learner.done()


class Learner:
    """One learner; `go` starts a thread that runs `train`."""

    def __init__(self, fleet: Fleet, name: str, *, seed: int = 0, shapes: Any = None, **options: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shapes = shapes or SHAPES
        self.params = {n: torch.nn.Parameter(torch.randn(s, generator=generator)) for n, s in self.shapes.items()}
        self.target = {n: torch.randn(s, generator=generator) for n, s in self.shapes.items()}
        self.unit = options.pop("unit", "tokens")
        self.frozen = options.pop("frozen", {})
        own = {key: options.pop(key) for key in ("align", "drain_s") if key in options}
        config = LearnerConfig(learner=name, join=JOIN, **{"drain_s": 10.0, **own})
        self.wire, self.shard_wires, self.fleet = Wire(fleet.connect()), dict[int, Wire](), fleet
        self.link: Link = Member(options, config, fleet.run_dir, connect=self._connected)
        self.name, self.steps, self.is_last = name, 0, None
        self._enough = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.result: Future[None] | None = None

    def _connected(self, address: JoinAddress) -> Connection:
        assert address.run == RUN
        if address.port == 1:
            return self.wire
        wire = self.shard_wires[address.port - 1] = Wire(Mortal(self.fleet.shards[address.port - 2].transport))
        return wire

    # ---------------------------------------------------------------------------------------- in the caller's thread

    def join(self) -> Learner:
        description = ModelDescription(dict(self.shapes), frozenset({"embedding"}), self.frozen, self.unit)
        self.link.start(description, lambda plan, config: CpuFragments(plan, self.params, config, self.link._learner))
        return self

    def step(self) -> None:
        time.sleep(PACE_S)
        self.link.settle()
        with torch.no_grad():
            for name, param in self.params.items():
                param.lerp_(self.target[name], 0.02)
        self.link.step(TOKENS, self.unit)
        self.steps += 1

    def finish(self) -> None:
        self.is_last = self.link.finish()
        if self.is_last:
            self.link.report(1.25)
        self.link.close()

    # ------------------------------------------------------------------------------------------- in a thread of its own

    def go(self) -> Learner:
        """Join and train until `enough`, then drain and leave."""
        self.result = self.aside(self._run)
        return self

    def aside(self, call: Callable[[], None]) -> Future[None]:
        return self._pool.submit(call)

    def enough(self) -> Learner:
        self._enough.set()
        return self

    def done(self) -> None:
        """Wait for its end; raise its error, if there was one."""
        assert self.result is not None
        self.result.result(timeout=DEADLINE_S)

    def _run(self) -> None:
        try:
            self.join()
            while not self._enough.is_set():
                self.step()
            self.finish()
        finally:
            self.link.close()

    def digests(self) -> list[str]:
        return [digest(self.link.device.anchor(p)) for p in range(self.link.plan.num_fragments)]

    @property
    def has_joined(self) -> bool:
        """Return whether it has joined; also True if `go` was not called, or if it has ended."""
        return self.link._state is not None or self.result is None or self.result.done()

    @property
    def landed(self) -> list[int]:
        return [f.landed for f in self.link._machine.fragments]


class Wire:
    """A learner's connection. It can be cut, and calls can be delayed or made to fail."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.is_cut = False
        self.before: dict[str, Callable[[], None]] = {}
        self.num_failed = 0

    def _enter(self, name: str) -> None:
        if self.is_cut:
            self.num_failed += 1
            raise TransportError(f"{name}: the wire is cut")
        self.before.get(name, lambda: None)()

    def send(self, session: str, messages: Any) -> Json:
        self._enter("send")
        return self._connection.send(session, messages)

    def poll(self, session: str, cursor: int, wait_s: float) -> Any:
        self._enter("poll")
        polled = self._connection.poll(session, cursor, min(wait_s, 0.1))
        if self.is_cut:
            raise TransportError("poll: the wire was cut")
        return polled

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        self._enter("put")
        return self._connection.put(bulk, deadline_s=deadline_s)

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        self._enter("get")
        return self._connection.get(header, deadline_s=deadline_s)

    def status(self) -> Json:
        return self._connection.status()

    def close(self) -> None:
        self._connection.close()


class Mortal(MemoryConnection):
    """A connection to a shard that may die during a call."""

    def _call(self, name: str, run: Callable[[Any], Any]) -> Any:
        try:
            return super()._call(name, run)
        except Crash:
            raise TransportError(f"{name}: the shard has died") from None


class ShardProcess:
    """A shard with its own directory, which can be killed and started again."""

    def __init__(self, directory: Path, part: tuple[int, int]) -> None:
        self.directory, self.part = directory, part
        self.service = ShardService(directory, part, KEY)
        self.transport = MemoryTransport(self.service, fault=self._called)
        self.is_dead = False

    def _called(self, name: str) -> None:
        if self.is_dead:
            raise TransportError(f"{name}: the shard is dead")

    def dies(self, point: str) -> None:
        """Raise `Crash` at this point of the disk, if the shard is dead or must die here."""
        if self.is_dead:
            raise Crash
        try:
            self._faults(point)
        except Crash:
            self.is_dead = True
            raise

    def remote(self) -> RemoteShard:
        return RemoteShard(
            self.part, address=lambda: f":{self.part[0] + 1}", connect=lambda: Mortal(self.transport), key=KEY
        )

    def crash(self) -> None:
        """Stop the shard and leave its disk as after a kill."""
        with suppress(Crash):
            self.service.stop()

    def restart(self, faults: Callable[[str], None] = no_faults) -> None:
        """Start a new process on the same directory, at the same address.

        Args:
            faults: called at each point of its disk; it dies where this raises `Crash`.
        """
        self.crash()
        self.is_dead, self._faults = False, faults
        self.service = self.transport.handler = ShardService(self.directory, self.part, KEY, faults=self.dies)


class Fleet:
    """A syncer on a run directory, and learners; a context manager that stops all of them."""

    def __init__(
        self, run_dir: Path, *, faults: Callable[[str], None] | None = None, num_shards: int = 1, **options: Any
    ) -> None:
        self.run_dir = run_dir
        settle_num_shards(run_dir, num_shards)
        self.shards = [ShardProcess(directory_of(run_dir, k), (k, num_shards)) for k in range(1, num_shards)]
        run_options = options.pop("run_options", OPTIONS)
        self.options = SyncerOptions(run_dir=run_dir, run_options=run_options, **options)
        self.faults = faults
        self.learners: list[Learner] = []
        self.summary: Json | None = None
        self.service = self._served()
        self.transport = MemoryTransport(self.service)
        self.connect: Callable[[], Connection] = self.transport.connect

    def _served(self) -> SyncerService:
        durable = SyncerStore(self.run_dir, faults=self.faults or no_faults, num_shards=1 + len(self.shards))
        remote = [shard.remote() for shard in self.shards]
        service = SyncerService(self.options, run=RUN, durable=durable, remote=remote)
        service.attach()
        until(lambda: service.missing is None, "all shards")
        service.start()
        return service

    def learner(self, name: str, **options: Any) -> Learner:
        self.learners.append(Learner(self, name, seed=len(self.learners), **options))
        return self.learners[-1]

    def stop(self) -> Json:
        self.summary = self.service.stop()
        return self.summary

    def crash(self) -> None:
        """Stop the syncer and leave its disk as after a kill, including commits in progress."""
        self.service._rest = lambda saved: None  # type: ignore[method-assign]
        self.stop()

    def restart(self, *, cleanly: bool = False) -> None:
        """Start a new process on the same run directory, at the same address."""
        if self.summary is None:
            self.stop() if cleanly else self.crash()
        self.service = self.transport.handler = self._served()
        self.summary = None

    @property
    def versions(self) -> list[int]:
        return [f.version for f in self.service.state.rounds.fragments]

    @property
    def num_commits(self) -> int:
        return self.service.state.rounds.counts.num_commits

    def until_commits(self, more: int) -> None:
        """Wait until all learners that train have joined, and then for this number of further commits."""
        until(lambda: all(learner.has_joined for learner in self.learners), "joins")
        wanted = self.num_commits + more
        until(lambda: self.num_commits >= wanted, f"{wanted} commits")

    def status(self) -> Json:
        return self.transport.connect().status()

    def published(self) -> list[Tensor]:
        return [self.store_of(p).anchor(p).published for p in range(len(self.service._store.layouts))]

    def store_of(self, p: int) -> AnchorStore:
        """Return the anchor store that holds this fragment."""
        k = p % (1 + len(self.shards))
        return self.service._store if k == 0 else self.shards[k - 1].service._own.anchors

    def digests(self) -> list[str]:
        return [self.store_of(p).digest(p) for p in range(len(self.service._store.layouts))]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for learner in self.learners:
            learner.enough()
            learner.wire.is_cut = False
            learner.wire.before.clear()
            if learner.result is None:
                learner.link.close()
            learner._pool.shutdown()
        if self.summary is None:
            self.stop()
        for shard in self.shards:
            shard.service.stop()
