"""The start of a run with a failing disk or a silent seeder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_diloco.config import PROTOCOL_VERSION, RunConfig
from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.errors import JoinError, PlanMismatchError
from lightning_diloco.learner import join as joining
from lightning_diloco.manifest import make_manifest
from lightning_diloco.protocol import messages
from lightning_diloco.syncer import service
from lightning_diloco.syncer.process import SyncerOptions, SyncerService
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk, Json, Polled
from tests.fuzz.target import MODEL, OPTIONS, Peer
from tests.learner.fleet import until
from tests.syncer.test_service import FullDisk
from tests.transport.memory import MemoryTransport


def offer(peer: Peer) -> None:
    """Send all messages of a seeder, without waiting for answers."""
    peer.say(messages.Hello(peer.learner, 1, PROTOCOL_VERSION, {}))
    grant = peer.hear(messages.SeedGrant)
    manifest, plan = make_manifest(MODEL, OPTIONS)
    for p in range(plan.num_fragments):
        header = {"what": "seed", "session": peer.session, "lease": grant.lease, "fragment": p}
        values = bytes_of(torch.zeros(plan.layout(p, 16).padded_numel))
        peer.connection.put(Bulk(header, values), deadline_s=5.0)
    peer.say(messages.SeedPlan(grant.lease, manifest))


def test_a_seed_whose_lease_has_passed_to_another_learner_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_S", 0.05)
    disk = FullDisk()
    served = SyncerService(SyncerOptions(run_dir=tmp_path), run="run", durable=SyncerStore(tmp_path, faults=disk))
    transport, state = MemoryTransport(served), served.state
    served.start()
    first, second = (Peer(transport.connect(), name) for name in ("first", "second"))
    first.say(messages.Hello("first", 1, PROTOCOL_VERSION, {}))
    first.hear(messages.SeedGrant)
    disk.is_full = True
    offer(first)
    until(lambda: served._todo, "a record that has to wait")
    patient = state.config
    state.config = replace(patient, lease_s=0.0)  # now the seeder is silent for too long
    until(lambda: state.seed_grant is None, "the end of its lease")
    state.config = patient
    disk.is_full = False
    until(lambda: not served._todo, "the disk")

    assert second.join().incarnation == 1
    assert state.manifest is not None
    served.stop()


class Storing:
    """A syncer that has received all start values but never stores them; counts received messages."""

    heard_s = float("-inf")

    def __init__(self, *answers: messages.FromSyncer) -> None:
        self._answers = (GRANT, *answers)
        self.num_said = 0

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        return {}

    def send(self, session: str, said: Sequence[Json]) -> Json:
        self.num_said += 1
        assert self.num_said < 1000, "it is asked without a pause"
        return {}

    def poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        return Polled(cursor, tuple(map(messages.encode, self._answers)))


GRANT = messages.SeedGrant(1, 1, "run", {})


class Values:
    """The part of a device that seeding needs."""

    def __init__(self, plan: FragmentPlan, config: RunConfig) -> None:
        self._plan = plan

    def local_values(self, p: int) -> torch.Tensor:
        return torch.zeros(self._plan.layout(p, 16).padded_numel)


def seed(syncer: Storing) -> None:
    joining.Joining(
        syncer,  # type: ignore[arg-type]
        JoinAddress("127.0.0.1", 1, "run", "token", "0" * 64),
        session="s",
        learner="l0",
        options=OPTIONS,
        model=MODEL,
        make_device=Values,  # type: ignore[arg-type]
    ).run()


def test_a_seeder_asks_for_stored_values_with_pauses_and_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "STORED_S", 0.3)
    syncer = Storing()
    with pytest.raises(JoinError, match=r"has not stored the start values .* its disk must take"):
        seed(syncer)
    assert 4 < syncer.num_said < 20, "the pauses grow"


def test_a_seeder_handles_a_refusal_that_arrives_with_an_earlier_answer() -> None:
    """Otherwise it asks again, and the syncer answers that it does not know the session."""
    refusal = messages.Rejected("plan", "fragment 0 holds values that are not finite")
    with pytest.raises(PlanMismatchError, match="not finite"):
        seed(Storing(refusal))
