"""The shard of a standby copies the primary's shard through all interruptions, and takes over from there."""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_diloco.errors import AuthError, ConfigError, CorruptLogError, StorageError, TransportError
from lightning_diloco.manifest import ModelDescription, make_manifest, plan_of
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.syncer import records
from lightning_diloco.storage import snapshots
from lightning_diloco.storage.files import Faults, no_faults
from lightning_diloco.storage.log_frames import Record
from lightning_diloco.syncer.anchors import fragments_of
from lightning_diloco.syncer.shards import requests as ask
from lightning_diloco.syncer.shards import service
from lightning_diloco.syncer.shards.copying import is_copied
from lightning_diloco.syncer.shards.remote import RemoteShard
from lightning_diloco.syncer.shards.service import ShardService
from lightning_diloco.syncer.shards.store import ShardStore
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.syncer.standby.requests import STANDBY, HaveLog
from lightning_diloco.syncer.standby.shards import StandbyShards
from lightning_diloco.syncer.standby.source import Source
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk, Json
from tests.learner.fleet import KEY, until
from tests.transport.memory import MemoryTransport

PART = (1, 2)
NUM_FRAGMENTS = 4
SHAPES = {"embedding": (8, 4), **{f"w{i}": (6, 4) for i in range(5)}}
MANIFEST, PLAN = make_manifest(
    ModelDescription(SHAPES, frozenset({"embedding"}), {}, "tokens"),
    {"sync_every": 8, "num_fragments": NUM_FRAGMENTS, "block_size": 16},
)
CONFIG = plan_of(MANIFEST)[1]
MINE = list(fragments_of(PART, NUM_FRAGMENTS))
PRIMARY = Invitation(JoinAddress("h", 1, "run", "token", "0" * 64), KEY)


@pytest.fixture(autouse=True)
def _small_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MIN_LOG_BYTES", 0)  # a snapshot every few versions
    monkeypatch.setattr(service, "SILENT_S", 0.0)


class Wire:
    """Calls a shard directly, unless it is cut, at once or after a number of calls."""

    def __init__(self, primary: Primary) -> None:
        self.send = self.poll = self.put = self.status = None
        self._primary = primary
        self.calls_left = 10**9
        self.after_call: Callable[[], object] = lambda: None

    def close(self) -> None:
        """See `Connection`."""

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise TransportError("cut")
        found = self._primary.service.on_get(header)
        self.after_call()
        return found


class Primary:
    """A shard of the primary, with the decisions of its syncer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.service = ShardService(directory, PART, KEY)
        self.decisions: list[tuple[ask.Decided, int]] = []  # including the record of the gradient
        self.versions, self.generation = dict.fromkeys(MINE, 0), 0
        self.digests: dict[tuple[int, int], str] = {}
        self._lsns: dict[int, int] = {}
        self._num = 0

    @property
    def store(self) -> ShardStore:
        return self.service._disk

    def seed(self) -> None:
        generator = torch.Generator().manual_seed(0)
        values = {p: torch.randn(_numel(p), generator=generator) for p in MINE}
        num_values = sum(_numel(p) for p in range(NUM_FRAGMENTS))
        self.store.store_seed(MANIFEST, values, num_values)
        self._note_digests()

    def prepare(self, p: int) -> None:
        """Log an outer gradient that differs from all others."""
        if p not in self.store.undecided:
            self._num += 1
            values_P = torch.randn(_numel(p), generator=torch.Generator().manual_seed(self._num))
            commit = records.CommitRecord(p, self.generation, self.versions[p] + 1, self._num, 1.0, 1, ())
            self._lsns[p] = self.store.write(commit, values_P.bfloat16())

    def decide(self, p: int) -> None:
        if p in self.store.undecided:
            self.versions[p] += 1
            self.store.decided(p, self.versions[p])
            self.decisions.append((ask.Decided(p, self.versions[p]), self._lsns[p]))
            self._note_digests()

    def withdraw(self) -> None:
        """Attach again, like a syncer that has died before its decision."""
        self.store.settle(self.versions)

    def regenerate(self) -> None:
        self.withdraw()
        self.generation += 1
        self.store.regenerate(self.generation)
        self._note_digests()

    def snapshot(self) -> None:
        self.store.snapshot_if_due()
        self.store.snapshots.wait()

    def restart(self) -> None:
        self.service.stop()
        self.service = ShardService(self.directory, PART, KEY)
        self.withdraw()

    def _note_digests(self) -> None:
        assert self.store.anchors is not None
        self.digests |= {(p, self.versions[p]): self.store.anchors.digest(p) for p in MINE}


class Standby:
    """The shard of a standby with the same number, and the standby's own log of decisions."""

    def __init__(self, directory: Path, primary: Primary) -> None:
        self.directory, self.primary = directory, primary
        self.faults: Faults = no_faults
        self.wire = Wire(primary)
        self.log: list[ask.Decided] = []
        self.following = "first"
        self.lsn: int | None = None
        self._start()

    def _start(self) -> None:
        def connect(invitation: Invitation) -> Source:
            return Source(invitation, self.wire)  # type: ignore[arg-type]

        def strike(point: str) -> None:
            self.faults(point)

        self.service = ShardService(self.directory, PART, KEY, connect=connect, faults=strike)

    def follow(self) -> Json:
        """Copy records, then write the decisions whose gradients have arrived."""
        told = tuple(self.log[-3:]) if self.lsn else ()
        self.lsn = (answer := call(self.service, ask.Follow(*PART, self.following, PRIMARY.text(), 0.0, told)))["lsn"]
        for decision, lsn in self.primary.decisions[len(self.log) :]:
            if lsn > (self.lsn or 0):
                break
            self.log.append(decision)
        return answer

    def restart(self) -> None:
        self.service.stop()
        self._start()

    def take_over(self) -> tuple[dict[int, int], dict[int, str]]:
        """Attach its syncer; return versions and digests."""
        versions = dict.fromkeys(MINE, 0) | {each.fragment: each.version for each in self.log}
        return versions, attach(self.service, versions, self.following)


def _numel(p: int) -> int:
    return PLAN.layout(p, CONFIG.block_size).padded_numel


def call(shard: ShardService, request: ask.Request) -> Json:
    return shard.on_get(ask.header(KEY, request)).header


def attach(shard: ShardService, versions: dict[int, int], following: str) -> dict[int, str]:
    positions = tuple(ask.Position(p, 0, version) for p, version in versions.items())
    answer = call(shard, ask.Attach("nonce", "run", *PART, "secret", positions, (), ask.Admitted(), following))
    return {int(p): digest for p, digest in answer["digests"].items()}


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[Primary]:
    found = Primary(tmp_path / "primary")
    found.seed()
    yield found
    found.service.stop()


@pytest.fixture
def standby(tmp_path: Path, primary: Primary) -> Iterator[Standby]:
    found = Standby(tmp_path / "standby", primary)
    yield found
    found.service.stop()


@pytest.mark.parametrize("seed", range(20))
def test_a_takeover_has_the_bits_of_each_announced_version(primary: Primary, standby: Standby, seed: int) -> None:
    """The shard's log may end at any record, with an undecided, withdrawn or missing gradient."""
    chance = random.Random(seed)
    usual = [lambda: primary.prepare(chance.choice(MINE)), lambda: primary.decide(chance.choice(MINE)), standby.follow]
    rare = [primary.withdraw, primary.regenerate, primary.snapshot, primary.restart, standby.restart]

    def go_on(num_decisions: int) -> None:
        until = len(primary.decisions) + num_decisions
        while len(primary.decisions) < until:
            standby.wire.calls_left = chance.choice([0, 1, 2, 3, *[10**9] * 8])
            with suppress(TransportError):
                chance.choice(rare if chance.random() < 0.1 else usual)()

    go_on(20)
    standby.wire.calls_left = 10**9
    for _ in range(2):  # it may have to copy the shard
        standby.follow()
    assert standby.log == [decision for decision, _ in primary.decisions]
    rare.remove(primary.snapshot)  # the shard is not copied again any more
    go_on(chance.randrange(4))
    versions, digests = standby.take_over()
    assert sum(versions.values()) >= 20
    assert digests == {p: primary.digests[p, versions[p]] for p in MINE}


def test_a_withdrawn_gradient_is_not_used_for_the_decision(primary: Primary, standby: Standby) -> None:
    p = MINE[0]
    standby.follow()
    primary.prepare(p)
    standby.follow()
    standby.wire.calls_left = 0
    primary.withdraw()
    primary.prepare(p)  # the same version, another gradient
    primary.decide(p)
    with pytest.raises(TransportError):
        standby.follow()
    assert (standby.lsn, standby.log, primary.decisions[0][1]) == (1, [], 3)
    assert standby.service._disk.undecided[p].version == primary.decisions[0][0].version
    standby.wire.calls_left = 10**9
    standby.follow()
    assert standby.take_over()[1][p] == primary.digests[p, 1]


def test_a_takeover_without_the_rule_has_other_bits(primary: Primary, standby: Standby) -> None:
    """This is the control of the test above."""
    p = MINE[0]
    standby.follow()
    primary.prepare(p)
    standby.follow()
    primary.withdraw()
    primary.prepare(p)
    primary.decide(p)
    standby.log.append(primary.decisions[0][0])
    assert standby.take_over()[1][p] != primary.digests[p, 1]


def test_a_decision_whose_gradient_is_missing_cannot_be_served(primary: Primary, standby: Standby) -> None:
    standby.follow()
    primary.prepare(MINE[0])
    primary.decide(MINE[0])
    standby.log.append(primary.decisions[0][0])
    with pytest.raises(CorruptLogError, match="version 0; the run has it at version 1"):
        standby.take_over()


def test_a_shard_without_versions_of_the_run_is_not_changed(primary: Primary, standby: Standby) -> None:
    standby.follow()
    primary.prepare(MINE[0])
    standby.follow()
    before = standby.service._disk.log.last_lsn
    with pytest.raises(CorruptLogError, match="the run has it at version 7"):
        attach(standby.service, dict.fromkeys(MINE, 7), standby.following)
    assert standby.service._disk.log.last_lsn == before
    assert is_copied(standby.directory), "it may follow on"


def test_a_disk_that_fills_during_a_batch_stores_none_of_it(primary: Primary, standby: Standby) -> None:
    standby.follow()
    for _ in range(3):
        primary.prepare(MINE[0])
        primary.decide(MINE[0])
    num_appended = itertools.count()

    def full(point: str) -> None:
        if point == "append:before" and next(num_appended) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    standby.faults = full
    with pytest.raises(StorageError, match="No space left"):
        standby.follow()
    assert standby.service._disk.log.last_lsn == 0
    assert standby.service.error is None
    standby.faults = no_faults
    standby.follow()
    assert standby.take_over() == (primary.versions, {p: primary.digests[p, primary.versions[p]] for p in MINE})


def test_a_copy_that_cannot_be_opened_ends_the_process(
    primary: Primary, standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(ShardStore, "_load", lambda self: (_ for _ in ()).throw(MemoryError("too large")))
        with pytest.raises(MemoryError):
            standby.follow()
    assert isinstance(standby.service.error, MemoryError)
    standby.restart()
    standby.follow()
    assert standby.take_over()[1] == {p: primary.digests[p, 0] for p in MINE}


def test_a_shard_that_works_for_a_syncer_does_not_follow(
    primary: Primary, standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    standby.follow()
    standby.take_over()
    standby.following = "second"
    monkeypatch.setattr(service, "SILENT_S", 60.0)
    with pytest.raises(TransportError, match="does not follow any more"):
        standby.follow()
    assert standby.service._attached is not None


def test_a_standby_writes_snapshots_of_its_own(primary: Primary, standby: Standby) -> None:
    standby.follow()
    for _ in range(10):
        for p in MINE:
            primary.prepare(p)
            primary.decide(p)
        standby.follow()
        standby.follow()  # it receives the decisions
        standby.service._disk.snapshots.wait()
    assert standby.service._disk.log.first_lsn > 10
    standby.restart()
    assert standby.take_over() == (primary.versions, {p: primary.digests[p, 10] for p in MINE})


def test_a_shard_whose_syncer_was_the_primary_copies_everything_again(primary: Primary, standby: Standby) -> None:
    standby.follow()
    for _ in range(3):
        primary.prepare(MINE[0])
        primary.decide(MINE[0])
        standby.follow()
    standby.take_over()
    with pytest.raises(TransportError, match="does not follow any more"):
        standby.follow()  # a request that was late
    assert standby.service._attached is not None
    assert not is_copied(standby.directory)
    standby.following = "second"
    standby.service._disk.write(
        records.CommitRecord(MINE[0], 0, 4, 99, 1.0, 1, ()), torch.ones(_numel(MINE[0])).bfloat16()
    )
    assert standby.follow() == {"lsn": 0, "has_all": False, "undecided": 0}, "it has the snapshot"
    standby.follow()
    assert standby.take_over()[1][MINE[0]] == primary.digests[MINE[0], 3]


def test_a_shard_keeps_its_own_files_until_the_copy_is_complete(primary: Primary, standby: Standby) -> None:
    standby.follow()
    primary.prepare(MINE[0])
    primary.decide(MINE[0])
    standby.follow()
    versions, digests = standby.take_over()
    standby.following = "second"
    for calls_left in range(4):
        standby.wire.calls_left = calls_left
        with pytest.raises(TransportError):
            standby.follow()
        standby.restart()
        assert attach(standby.service, versions, "") == digests


def test_a_syncer_that_attaches_during_a_copy_is_not_disturbed_by_it(primary: Primary, standby: Standby) -> None:
    standby.follow()
    primary.prepare(MINE[0])
    standby.wire.after_call = lambda: attach(standby.service, dict.fromkeys(MINE, 0), "")
    with pytest.raises(TransportError, match="does not follow any more"):
        standby.follow()
    assert standby.service._disk.log.last_lsn == 0
    assert not is_copied(standby.directory)


def test_a_standby_before_the_start_values_has_nothing_to_copy(tmp_path: Path) -> None:
    primary = Primary(tmp_path / "primary")
    standby = Standby(tmp_path / "standby", primary)
    assert standby.follow() == {"lsn": None, "has_all": False, "undecided": 0}
    primary.seed()
    assert standby.follow() == {"lsn": 0, "has_all": False, "undecided": 0}
    assert standby.follow() == {"lsn": 0, "has_all": True, "undecided": 0}
    primary.service.stop()
    standby.service.stop()


@pytest.fixture
def shards(standby: Standby) -> Iterator[StandbyShards]:
    connect = MemoryTransport(standby.service).connect
    remote = RemoteShard(PART, address=lambda: ":1", connect=connect, key=KEY)
    found = StandbyShards([remote], PRIMARY)
    found.know([":2"])
    yield found
    found.end(is_over=False)


def state(*versions: int) -> Any:
    rounds = SimpleNamespace(fragments=[SimpleNamespace(version=version) for version in versions])
    return SimpleNamespace(manifest=MANIFEST, rounds=rounds)


def test_a_standby_waits_for_gradients_and_its_shards_end_with_the_run(
    primary: Primary, standby: Standby, shards: StandbyShards
) -> None:
    assert not shards.have_all
    shards.open(state(0, 0, 0, 0))
    until(lambda: shards.have_all, "a whole copy")
    decision = Record(9, {"kind": "CommitRecord", "fragment": MINE[0], "version": 1, "shard_lsn": 1}, memoryview(b""))
    own = Record(8, {"kind": "CommitRecord", "fragment": 0, "version": 1, "shard_lsn": 0}, memoryview(b""))
    assert shards.num_complete([own, decision], 0.0) == 1
    primary.prepare(MINE[0])
    until(lambda: shards.num_complete([own, decision], 0.1) == 2, "the gradient")
    assert standby.service._disk.undecided
    shards.wrote([own, decision])
    until(lambda: not standby.service._disk.undecided, "the decision")
    shards.end(is_over=True)
    assert standby.service.is_over


def test_known_addresses_are_kept_and_another_number_of_shards_is_refused(shards: StandbyShards) -> None:
    shards.know([""])
    assert shards._each[0].address == ":2"
    with pytest.raises(ConfigError, match="the primary has 3 shards, this standby has 2; start the standby again"):
        shards.know([":2", ":3"])


def test_requests_of_a_standby_to_a_shard_need_the_key_and_the_right_number(primary: Primary) -> None:
    with pytest.raises(ConfigError, match=r"this is shard 1 of 2; the syncer wants 1 of 3"):
        call(primary.service, ask.Follow(1, 3, "a", PRIMARY.text(), 0.0))
    header = {"what": STANDBY, "key": "another", "request": codec.dump(HaveLog(1, "h:1"))}
    with pytest.raises(AuthError, match="without the key"):
        primary.service.on_get(header)
    with pytest.raises(TransportError, match="does not answer HaveLog"):
        primary.service.on_get(header | {"key": KEY})
