"""The same contributions give the same bits with any number of shards."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.core.quantize import encode_fragment
from lightning_diloco.manifest import ModelDescription, make_manifest, plan_of
from lightning_diloco.protocol import actions, events, messages
from lightning_diloco.protocol.syncer import records
from lightning_diloco.syncer.contribution_archive import Recorder
from lightning_diloco.syncer.merge_worker import DurableCommit, MergeWorker
from lightning_diloco.syncer.payloads import Payloads
from lightning_diloco.syncer.shards.remote import RemoteShard
from lightning_diloco.syncer.shards.requests import Admitted, Attach, StoreSeed
from lightning_diloco.syncer.shards.service import ShardService
from lightning_diloco.syncer.shards.shard import OwnShard, Shard
from lightning_diloco.syncer.store import SyncerStore, seeded_store
from lightning_diloco.transport.base import Bulk, Json
from tests.learner.fleet import KEY, until
from tests.transport.memory import MemoryTransport

SESSIONS = ("s0", "s1", "s2")
NUM_FRAGMENTS, NUM_VERSIONS = 4, 6
SHAPES = {"embedding": (24, 8), "hidden": (16, 12), "other": (16, 12), "bias": (16,)}
MANIFEST, PLAN = make_manifest(
    ModelDescription(SHAPES, frozenset({"embedding"}), {}, "tokens"),
    {"sync_every": 8, "num_fragments": NUM_FRAGMENTS, "block_size": 16, "merge": "rda"},
)
CONFIG = plan_of(MANIFEST)[1]


class Everybody:
    """Admits all uploads."""

    config = CONFIG

    def may_merge(self, session: str, ready: messages.Ready) -> bool:
        return True


class Syncer:
    """Merges contributions, with some shards in other processes."""

    def __init__(self, run_dir: Path, num_shards: int) -> None:
        self.heard: list[events.SyncerEvent] = []
        self.part = (0, num_shards)
        self.desk = Payloads(self.part)
        self.own = OwnShard(self.desk, Recorder(run_dir))
        self.services = [ShardService(run_dir / str(k), (k, num_shards), KEY) for k in range(1, num_shards)]
        self.remote = [self._remote(service) for service in self.services]
        self.shards: list[Shard] = [self.own, *self.remote]
        self.durable = SyncerStore(run_dir, num_shards=num_shards)
        self.worker = MergeWorker(self.shards, self.durable, False, lambda error: None)
        until(lambda: all(shard.is_attached for shard in self.remote), "the shards")
        self._seed()

    def _remote(self, service: ShardService) -> RemoteShard:
        connect = MemoryTransport(service).connect
        shard = RemoteShard(service.part, address=lambda: ":1", connect=connect, key=KEY)
        attach = Attach("", "run", *service.part, "secret", None, (), Admitted(SESSIONS, ("s0", 1)))
        shard.start(lambda: attach, self.heard.append)
        return shard

    def _seed(self) -> None:
        generator, own = torch.Generator().manual_seed(0), {}
        num_values = 0
        for p in range(NUM_FRAGMENTS):
            values = torch.randn(PLAN.layout(p, CONFIG.block_size).padded_numel, generator=generator)
            num_values += values.numel()
            if p % len(self.shards) == 0:
                own[p] = values
            else:
                self._put(p, {"what": "seed", "session": "s0", "lease": 1, "fragment": p}, values)
        for shard in self.remote:
            assert shard.size_of_seed("s0", 1, NUM_FRAGMENTS) is not None
            shard.store_seed(StoreSeed("s0", 1, MANIFEST, num_values))
        self.own.anchors = seeded_store(MANIFEST, own, part=self.part, num_values=num_values)

    def _put(self, p: int, header: Json, values: torch.Tensor) -> None:
        self.services[p % len(self.shards) - 1].on_put(Bulk(header, bytes_of(values)))

    def merge(self, p: int, version: int, *, first_seq: int = 1, ends: str = "committed") -> None:
        """Merge a contribution of each session; the second one may be much longer than the others.

        Args:
            p: fragment.
            version: version that the merge gives.
            first_seq: seq of the contributions to version 1.
            ends: "refused": the contributions are dropped before they are merged, and nothing is committed.
        """
        shard = self.shards[p % len(self.shards)]
        layout = PLAN.layout(p, CONFIG.block_size)
        chosen = []
        for m, session in enumerate(SESSIONS):
            generator = torch.Generator().manual_seed(1000 * version + 10 * p + m)
            values = torch.randn(layout.padded_numel, generator=generator) * (6 if version > 4 and m == 1 else 1)
            payload = encode_fragment(layout, values, CONFIG.wire, CONFIG.block_size)
            ready = messages.Ready(
                fragment=p,
                seq=version,
                base=version - 1,
                generation=0,
                start=8 * version,
                stop=8 * version + 8,
                steps=8,
            )
            chosen.append(actions.Contribution(session, f"l{m}", 1, ready, 8))
            header = {"what": "contribution", "session": session, "ready": messages.encode(ready), "error": None}
            if shard is self.own:
                self.desk.take_contribution(session, Bulk(header, bytes_of(payload)), self.own.anchors, Everybody())
            else:
                self._put(p, header, payload)
        job = shard.job(actions.Merge(p, version, tuple(chosen), (0.5, 0.3, 0.2)))
        drops = [actions.DropPayload(c.session, p, c.ready.seq) for c in chosen]
        if ends == "refused":
            for drop in drops:
                shard.drop(drop)
        (merged,) = self.worker.merge(job)
        if ends == "refused":
            return
        assert isinstance(merged, events.Merged)
        merges = tuple(records.Merge(c.session, c.ready, 0.3, merged.kept.get(c.session, 1.0)) for c in chosen)
        commit = records.CommitRecord(p, 0, version, version, 1.0, 3, merges)
        (made,) = self.worker.commit(actions.Apply(commit))
        assert isinstance(made, DurableCommit)
        shard.install(commit, made.prepared)
        names = [c.learner for c in chosen]
        self.durable.past.usual.learn(p, names, made.report.norms, [8] * 3, made.report.kept)
        for drop in drops:
            shard.drop(drop)
        self.digests[p].append((made.event.digest, merged.kept, made.report, made.prepared.lr))

    def run(self) -> list[list[object]]:
        """Return the results of all merges, by fragment."""
        self.digests: list[list[object]] = [[] for _ in range(NUM_FRAGMENTS)]
        for version in range(1, NUM_VERSIONS + 1):
            for p in range(NUM_FRAGMENTS):
                self.merge(p, version)
        return self.digests

    def close(self) -> None:
        for shard in self.remote:
            shard.stop(is_over=False, until_s=time.monotonic() + 10.0)
        for service in self.services:
            service.stop()
        self.durable.close()


def found(run_dir: Path, num_shards: int) -> list[list[object]]:
    syncer = Syncer(run_dir, num_shards)
    try:
        return syncer.run()
    finally:
        syncer.close()


@pytest.mark.seconds
@pytest.mark.parametrize("num_shards", [2, 4])
def test_the_same_contributions_give_the_same_bits(tmp_path: Path, num_shards: int) -> None:
    one = found(tmp_path / "one", 1)
    assert found(tmp_path / "several", num_shards) == one
    assert len({digest for versions in one for digest, *_ in versions}) == NUM_FRAGMENTS * NUM_VERSIONS
    assert any(kept for versions in one for _, kept, *_ in versions), "the norm guard has had something to do"


@pytest.mark.seconds
def test_the_next_contribution_is_accepted_after_a_drop_during_the_merge(tmp_path: Path) -> None:
    syncer = Syncer(tmp_path, 2)
    try:
        syncer.digests = [[] for _ in range(NUM_FRAGMENTS)]
        syncer.merge(1, 1, ends="refused")
        until(lambda: not syncer.services[0]._desk._payloads, "the drops")
        syncer.merge(1, 1, first_seq=2)
    finally:
        syncer.close()
