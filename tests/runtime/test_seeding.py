"""The start of a run when the disk, or the seeder, is not there at the right moment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_diloco.config import PROTOCOL_VERSION
from lightning_diloco.protocol import messages
from lightning_diloco.runtime import service
from lightning_diloco.runtime.anchors import bytes_of
from lightning_diloco.runtime.durable import Durable
from lightning_diloco.runtime.manifest import make_manifest
from lightning_diloco.runtime.syncer import SyncerOptions, SyncerService
from lightning_diloco.transport.base import Bulk
from lightning_diloco.transport.memory import MemoryTransport
from tests.fuzz.target import MODEL, OPTIONS, Peer
from tests.runtime.fleet import until
from tests.runtime.test_service import FullDisk


def offer(peer: Peer) -> None:
    """All that a seeder says, without waiting for an answer to it."""
    peer.say(messages.Hello(peer.learner, 1, PROTOCOL_VERSION, {}))
    grant = peer.hear(messages.SeedGrant)
    manifest, plan = make_manifest(MODEL, OPTIONS)
    for p in range(plan.num_fragments):
        header = {"what": "seed", "session": peer.session, "lease": grant.lease, "fragment": p}
        values = bytes_of(torch.zeros(plan.layout(p, 16).padded_numel))
        peer.connection.put(Bulk(header, values), deadline_s=5.0)
    peer.say(messages.SeedPlan(grant.lease, manifest))


def test_a_seed_whose_lease_passed_on_while_the_disk_was_full_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_S", 0.05)
    disk = FullDisk()
    served = SyncerService(SyncerOptions(run_dir=tmp_path), run="run", durable=Durable(tmp_path, faults=disk))
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
