"""Parts of fragments on two hosts with four virtual devices, in one process; test_xla_spmd.py starts it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.xla import ops as xla
from lightning_diloco.devices.xla.hosts import XlaHostFragments
from lightning_diloco.errors import ConfigError
from tests.devices.rig import BLOCK
from tests.xla.spmd_fragment_cases import NUM_DEVICES, Sharded, _small_units  # noqa: F401

pytestmark = pytest.mark.xla

HOSTS = [[[0, 1], [2, 3]], [[0, 3], [1, 2]]]  # devices need not be numbered in the order of hosts


@pytest.fixture(scope="module", autouse=True)
def _mesh():
    assert xla.use_mesh() == NUM_DEVICES


@contextmanager
def looking_from(rows):
    """Allow only values on these devices to be fetched."""
    every_shard = xla._shards
    xla._shards = lambda tensor: [every_shard(tensor)[row] for row in rows]
    try:
        yield
    finally:
        xla._shards = every_shard


class TwoHosts(Sharded):
    """A device for each host with the same parameters; `device` reads all values."""

    def __init__(self, hosts, dtype=torch.float32, **options):
        super().__init__(dtype, **options)
        config = RunConfig(block_size=BLOCK, num_fragments=3, wire=self.wire)
        learner = {name: value for name, value in options.items() if name != "wire"}
        self.rows, self.hosts = hosts, []
        for rows in hosts:
            with looking_from(rows):
                host = XlaHostFragments(self.plan, self.params, config, LearnerConfig(**learner))
            for p in self.fragments:
                host.adopt(p, self.device.anchor(p))
            self.hosts.append(host)
        self.first = self.hosts[0]
        self.first.rows_of_hosts = hosts

    def each(self, method, *args):
        """Return the result of every host."""
        found = []
        for rows, host, arg in zip(self.rows, self.hosts, args or self.hosts, strict=True):
            with looking_from(rows):
                found.append(method(host, arg))
        return found


@pytest.mark.parametrize(
    ("rows", "wire", "dtype", "place"),
    [(HOSTS[0], "int8", torch.float32, "device"), (HOSTS[1], "int8", torch.bfloat16, "host"),
     (HOSTS[1], "int4", torch.float32, "host"), (HOSTS[0], "bf16", torch.float32, "device")],
)  # fmt: skip
@torch.no_grad()
def test_parts_of_all_hosts_join_to_the_values_of_one_host(rows, wire, dtype, place):
    rig = TwoHosts(rows, dtype, wire=wire, anchor_device=place)
    assert [host._own_rows for host in rig.hosts] == rows
    for p in rig.fragments:
        rig.train()
        local = rig.each(lambda host, _, p=p: host.local_values(p))
        assert torch.equal(rig.first.whole(p, local), rig.device.local_values(p))
        expected = rig.contribute(p)
        snapshots = rig.each(lambda host, _, p=p: host.snapshot(p))
        parts = rig.each(lambda host, snapshot: host.delta(snapshot), *snapshots)
        assert [len(part) for part in parts] == rig.first.sizes(snapshots[0])
        found = rig.first.encoded(snapshots[0], parts)
        assert torch.equal(found.payload, expected.payload)
        assert found.norm == pytest.approx(expected.norm, rel=1e-6)

        update = Update(None, [rig.published(p)], found.payload)
        for host in rig.hosts:
            before = host.local(p)
            host.land(p, host.stage(p, update))
            after = host.local(p)
            host._put(p, before)  # for the next one: they have the same parameters
        host._put(p, after)
        rig.device._put(p, before)
        rig.device.land(p, rig.device.stage(p, update))
        anchors = rig.each(lambda host, _, p=p: host.anchor(p))
        assert [len(part) for part in anchors] == rig.first.numels(p)
        assert torch.equal(rig.first.whole(p, anchors), rig.device.anchor(p))
        assert torch.equal(*xla.fetch(after, rig.device.local(p)))


def test_a_host_does_not_read_values_on_other_hosts():
    rig = Sharded()
    for rows in HOSTS[1]:
        with looking_from(rows):
            assert xla.own_rows() == rows
            (found,) = xla.fetch(rig.params["matrix"].detach())
        lies_here = found.abs().sum(0).view(NUM_DEVICES, -1).bool().all(1)  # its columns are cut
        assert lies_here.nonzero().view(-1).tolist() == rows


def test_samples_of_a_host_become_a_batch_over_all_devices(monkeypatch):
    samples = torch.randn(8, 3)
    batch = xla.upload_samples(samples)
    assert xla.sharded_dim(batch) == 0
    assert torch.equal(xla.fetch(batch)[0], samples)
    assert float(xla.upload_samples(torch.tensor(3.0))) == 3
    with pytest.raises(ConfigError, match=r"a batch of shape \(6, 3\) on a host with 4 devices"):
        xla.upload_samples(samples[:6])
