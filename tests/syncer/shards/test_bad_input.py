"""Invalid input that a run with shards refuses before anything is lost."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_diloco.cli.main import main
from lightning_diloco.errors import (
    AuthError,
    ConfigError,
    CorruptLogError,
    CorruptMessageError,
    PlanMismatchError,
    TransportError,
)
from lightning_diloco.protocol import codec
from lightning_diloco.syncer.payloads import Payloads
from lightning_diloco.syncer.shards import elsewhere
from lightning_diloco.syncer.shards import requests as ask
from lightning_diloco.syncer.shards.layout import directory_of, listen_of, tell_token
from lightning_diloco.syncer.shards.process import parsed_part
from lightning_diloco.syncer.shards.resharding import settle_num_shards
from lightning_diloco.syncer.shards.service import ShardService
from lightning_diloco.syncer.shards.whole import read_run
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk, Json
from tests.learner.fleet import KEY, Fleet, finish
from tests.syncer.shards.test_copying import MINE, Primary

ADDRESS = JoinAddress("10.0.0.1", 7000, "run", "token", "0" * 64)


@pytest.mark.parametrize("text", ["0/2", "2/2", "3/2", "1", "1/", "/2", "-1/2", "one/2", "1/2/3"])
def test_an_invalid_shard_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--shard .*: must be k/S"):
        parsed_part(text)
    assert parsed_part("1/2") == (1, 2)


def test_the_number_of_shards_is_recorded(tmp_path: Path) -> None:
    assert settle_num_shards(tmp_path / "new", None) == 1
    assert settle_num_shards(tmp_path, 3) == 3
    assert settle_num_shards(tmp_path, 2) == 2
    assert settle_num_shards(tmp_path, None) == 2
    for wrong in (0, -1, 65):
        with pytest.raises(ConfigError, match=r"must be 1\.\.64"):
            settle_num_shards(tmp_path, wrong)


def test_a_shard_keeps_its_port(tmp_path: Path) -> None:
    assert listen_of(tmp_path, 2, "0.0.0.0:7000") == "0.0.0.0:7002"
    assert listen_of(tmp_path, 2, "127.0.0.1:0") == "127.0.0.1:0"
    tell_token(tmp_path, 2, JoinAddress("host", 7000, "run", "token", "0" * 64))
    assert listen_of(tmp_path, 2, "0.0.0.0:7000") == "0.0.0.0:7002", "it has not listened yet"
    (directory_of(tmp_path, 2) / "join").write_text("diloco://host:7012/run#token," + "0" * 64)
    assert listen_of(tmp_path, 2, "0.0.0.0:7000") == "0.0.0.0:7012"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--elsewhere", "--elsewhere: the run has one shard"),
        ("--shard 1/2", "--shard 1/2 needs --of"),
        ("--shard 2/2 --of standby", "must be k/S"),
        ("--of standby", "--of belongs to --shard"),
        ("--shards 0", "must be 1..64"),
    ],
)
def test_the_command_refuses_contradictory_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    assert main(["syncer", "--run-dir", str(tmp_path / "run"), *flags.split()]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.seconds
def test_more_shards_than_fragments_are_refused_at_the_seed(tmp_path: Path) -> None:
    with (
        Fleet(tmp_path, num_shards=4) as fleet,
        pytest.raises((ConfigError, PlanMismatchError), match="fewer --shards"),
    ):
        fleet.learner("l0").join()


def attach(shard: ShardService, **changed: object) -> Json:
    said = ask.Attach("nonce", "run", *shard.part, "secret", None, (), ask.Admitted())
    header = {"what": ask.SHARD, "key": KEY, "nonce": "", "request": codec.dump(said) | changed}
    return shard.on_get(header).header


def test_a_shard_works_only_for_the_syncer_that_has_its_key_and_attached_last(tmp_path: Path) -> None:
    shard = ShardService(tmp_path, (1, 2), KEY)
    figures = {"what": ask.SHARD, "key": KEY, "nonce": "nonce", "request": codec.dump(ask.Figures())}
    with pytest.raises(TransportError, match="waits for its syncer"):
        shard.on_get(figures)
    with pytest.raises(AuthError, match="without the key"):
        shard.on_get(figures | {"key": "another"})
    with pytest.raises(ConfigError, match=r"shard 1 of 2; the syncer wants 1 of 3"):
        attach(shard, num_shards=3)
    attach(shard)
    assert shard.on_get(figures).header == {"pid": os.getpid(), "bytes_up": 0, "bytes_down": 0}
    attach(shard, nonce="later")
    with pytest.raises(TransportError, match="another syncer has attached"):
        shard.on_get(figures)
    with pytest.raises(TransportError, match="another syncer has attached"):
        shard.on_poll("nonce", 0, 0.0)
    with pytest.raises(ConfigError, match="has no files of run"):
        attach(shard, positions=[{"fragment": 1, "generation": 0, "version": 3}])
    shard.stop()


def test_a_shard_that_the_syncer_refuses_ends_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Syncer:
        def __init__(self, *_: object) -> None: ...

        def get(self, *_: object, **__: object) -> None:
            raise ConfigError("shard 1 of 3 reported to a run with 2 shards")

        def close(self) -> None: ...

    monkeypatch.setattr(elsewhere, "FlightConnection", Syncer)
    monkeypatch.setattr(elsewhere, "REPORT_S", 0.01)
    shard: Any = SimpleNamespace(part=(1, 3), is_polled=False, error=None)
    reporting = elsewhere.Reporting(Invitation(ADDRESS, "key"), shard, "10.0.0.2:7001")
    reporting._thread.join(5.0)
    assert not reporting._thread.is_alive()
    assert "a run with 2 shards" in str(shard.error)


@pytest.mark.seconds
def test_files_of_another_moment_or_of_another_shard_are_refused(tmp_path: Path) -> None:
    with Fleet(tmp_path / "run", num_shards=2) as fleet:
        learner = fleet.learner("l0").go()
        fleet.until_commits(4)
        shard = fleet.shards[0]
        shard.restart()
        shutil.copytree(shard.directory, tmp_path / "before")
        fleet.until_commits(8)
        finish(learner)
        fleet.stop()
        shard.service.stop()
        with pytest.raises(ConfigError, match=r"of shard 1 of 2; this is shard 1 of 3"):
            ShardService(shard.directory, (1, 3), KEY)
    shard.directory.rename(tmp_path / "after")
    shutil.copytree(tmp_path / "before", shard.directory)
    with pytest.raises(CorruptLogError, match=r"shard 1 has fragment 1 at version .* as of one moment"):
        read_run(tmp_path / "run")
    shutil.rmtree(shard.directory)
    (tmp_path / "after").rename(shard.directory)
    state, store = read_run(tmp_path / "run")
    assert store is not None
    assert [store.anchor(p).version for p in range(3)] == [f.version for f in state.rounds.fragments]


def test_start_values_sent_to_the_wrong_process_are_refused() -> None:
    desk = Payloads((1, 2))
    header = {"what": "seed", "session": "s0", "lease": 1, "fragment": 0}
    with pytest.raises(CorruptMessageError, match="fragment 0, which is not held here"):
        desk.take_seed("s0", Bulk(header, memoryview(bytes(8))), ("s0", 1))


def test_a_gradient_that_was_withdrawn_later_is_not_used(tmp_path: Path) -> None:
    """A backup of a shard may hold the version that the run has, with other values."""
    primary, p = Primary(tmp_path / "shard"), MINE[0]
    primary.seed()
    primary.prepare(p)
    shutil.copytree(tmp_path / "shard", tmp_path / "backup")
    primary.withdraw()
    primary.prepare(p)
    primary.decide(p)
    positions = [
        {"fragment": q, "generation": 0, "version": version, "digest": primary.digests[q, version]}
        for q, version in primary.versions.items()
    ]
    primary.service.stop()
    for directory, said in (("backup", "shard 1 has other values of fragment 1, version 1"), ("shard", "")):
        shard = ShardService(tmp_path / directory, (1, 2), KEY)
        with pytest.raises(CorruptLogError, match=said) if said else nullcontext():
            attach(shard, positions=positions)
        shard.stop()
