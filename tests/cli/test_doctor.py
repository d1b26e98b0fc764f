"""`diloco doctor` with a real syncer: it measures the link, and checks that do not fit fail."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.cli.main import main
from lightning_diloco.cli.sites import doctor as doctor_verb
from lightning_diloco.cli.sites import measure
from lightning_diloco.errors import CorruptMessageError, StandbyError
from lightning_diloco.syncer.gated_handler import GatedHandler
from lightning_diloco.syncer.payloads import made_up
from lightning_diloco.transport.address import JoinAddress, split_host_port
from lightning_diloco.transport.faults import FaultProxy
from lightning_diloco.transport.flight import FlightServer
from lightning_diloco.transport.frames import MAX_PROBE_BYTES
from lightning_diloco.transport.identity import ServerIdentity
from tests.learner.fleet import RUN, Fleet

DELAY_S, RATE_BPS = 0.02, 80e6


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PROBE_S", 0.2)
    monkeypatch.setattr(doctor_verb, "_ANSWER_S", 0.5)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path) as fleet:
        yield fleet
        fleet.stop()


@pytest.fixture
def address(fleet: Fleet) -> Iterator[JoinAddress]:
    """Address of the syncer, behind a link of known rate and delay."""
    with FlightServer(fleet.service, "127.0.0.1:0", token="secret") as server:
        direct = server.join_address(RUN)
        with FaultProxy(f"127.0.0.1:{direct.port}", delay_s=DELAY_S, rate_bps=RATE_BPS) as proxy:
            host, port = split_host_port(proxy.address)
            yield replace(direct, host=host, port=port)


@pytest.fixture
def silent() -> Iterator[str]:
    """Return the address of a suspended process, which is connected to but never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def standby_of(session: str | None) -> None:
    raise StandbyError("it is the standby of this run")


def failing(checks: dict[str, Any]) -> list[str]:
    return [name for name, check in checks.items() if check["is_good"] is False]


def doctor(address: JoinAddress, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["doctor", *words, "--join", address.join_string(), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["is_good"] == (code == 0)
    return code, {check["name"]: check for check in found["checks"]}


@pytest.mark.slow
def test_the_link_is_measured(address: JoinAddress, capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = doctor(address, capsys, "gpt2/124m")
    assert code == 0
    round_trip_ms = float(checks["round trip"]["found"].split()[0])
    assert 2e3 * DELAY_S <= round_trip_ms <= 10e3 * DELAY_S
    for way in ("up", "down"):
        measured = float(checks[way]["found"].split()[0])
        assert 0.5e-6 * RATE_BPS <= measured <= 1.05e-6 * RATE_BPS, checks[way]
    assert "5.2 MiB" in checks["a fragment"]["found"]
    assert checks["learner's link"]["is_good"]
    assert "GB/s" in checks["this machine"]["found"]
    if sys.platform == "linux":
        assert checks["syncer"]["found"].endswith("reached from 127.0.0.1 (lo)")


@pytest.mark.seconds
def test_a_link_that_is_too_slow_for_the_recipe_fails_and_a_fix_is_named(
    address: JoinAddress, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = doctor(address, capsys, "mistral/12b-8gpu")
    assert code == 1
    assert checks["learner's link"]["is_good"] is False
    assert "Gbit/s" in checks["what would help"]["found"] or "sync_every" in checks["what would help"]["found"]


def test_a_wrong_token_and_an_unreachable_syncer_fail(address: JoinAddress, capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = doctor(replace(address, token="wrong"), capsys)
    assert code == 1
    assert "token" in checks["syncer's answer"]["found"]
    code, checks = doctor(replace(address, port=1), capsys)
    assert code == 1
    assert "cannot be reached" in checks["syncer"]["found"]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({"clock_s": 1e9}, "clock"),
        ({"protocol": 1}, "protocol"),
        ({"protocol": None}, "protocol"),
    ],
)
def test_another_clock_or_version_fails(
    told: dict[str, Any], name: str, fleet: Fleet, address: JoinAddress, capsys: pytest.CaptureFixture[str]
) -> None:
    status = fleet.service.on_status()
    fleet.service.on_status = lambda: {**status, **told}  # type: ignore[method-assign]
    code, checks = doctor(address, capsys)
    assert code == 1
    assert failing(checks) == [name]


def test_another_certificate_than_the_pinned_one_fails(
    address: JoinAddress, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = doctor(replace(address, fingerprint="0" * 64), capsys)
    assert (code, failing(checks)) == (1, ["syncer's answer"])
    assert f"only the pinned {'0' * 64} is trusted" in checks["syncer's answer"]["found"]
    assert "round trip" not in checks


@pytest.mark.seconds
def test_each_shard_must_answer(
    tmp_path: Path, silent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "PROBE_S", 0.02)
    tls = ServerIdentity.create()
    with (
        Fleet(tmp_path, num_shards=3) as fleet,
        FlightServer(fleet.service, "127.0.0.1:0", token="t", tls=tls) as syncer,
        FlightServer(fleet.shards[0].service, "127.0.0.1:0", token="t", tls=tls) as shard,
    ):
        first, second = fleet.service._shards[1:]
        first.address = second.address = f":{split_host_port(shard.address)[1]}"  # without a host: the syncer's
        code, checks = doctor(syncer.join_address(RUN), capsys, "gpt2/124m")
        assert code == 0
        for name in ("shard 1", "shard 2"):
            assert checks[name]["found"].startswith(f"{shard.address}: round trip ")
            assert checks[name]["found"].count("Mbit/s") == 2
        second.address = silent
        code, checks = doctor(syncer.join_address(RUN), capsys)
        assert (code, failing(checks)) == (1, ["shard 2"])
        assert silent in checks["shard 2"]["found"]
        assert checks["shard 1"]["is_good"]
        second.address = ""
        assert failing(doctor(syncer.join_address(RUN), capsys)[1]) == ["shard 2"]


@pytest.mark.seconds
def test_a_standby_must_answer(fleet: Fleet, silent: str, capsys: pytest.CaptureFixture[str]) -> None:
    tls, standby = ServerIdentity.create(), GatedHandler()
    standby.refused = standby_of
    with (
        FlightServer(fleet.service, "127.0.0.1:0", token="t", tls=tls) as syncer,
        FlightServer(standby, "127.0.0.1:0", token="t", tls=tls) as other,
    ):
        address = replace(syncer.join_address(RUN), standby=other.address)
        code, checks = doctor(address, capsys)
        assert (code, checks["standby"]["is_good"]) == (0, True)
        code, checks = doctor(replace(address, standby=silent), capsys)
        assert (code, failing(checks)) == (1, ["standby"])
        assert "cannot go on if the syncer fails" in checks["standby"]["found"]
        assert "down" in checks
        status = fleet.service.on_status()
        fleet.service.on_status = lambda: {**status, "standby": {"address": silent}}  # type: ignore[method-assign]
        assert failing(doctor(syncer.join_address(RUN), capsys)[1]) == ["standby"], "learners hear of it"


@pytest.mark.seconds
def test_a_standby_that_has_taken_over_is_used(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    with FlightServer(fleet.service, "127.0.0.1:0", token="t") as server:
        serves = server.join_address(RUN)
        code, checks = doctor(replace(serves, port=1, standby=serves.host_port), capsys)
        assert code == 0
        assert "127.0.0.1:1 cannot be reached" in checks["first address"]["found"]
        assert f"served at {serves.host_port} instead" in checks["first address"]["found"]
        assert serves.host_port in checks["syncer"]["found"]
        assert "down" in checks
        code, checks = doctor(replace(serves, port=1, standby="127.0.0.1:2"), capsys)
        assert (code, failing(checks)) == (1, ["syncer", "standby"])


@pytest.mark.seconds
def test_an_explicit_run_dir_is_the_syncers_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DILOCO_JOIN", f"diloco://127.0.0.1:1/{RUN}#token," + "0" * 64)
    assert main(["doctor", "--run-dir", str(tmp_path)]) == 0
    assert "for diloco plan" in capsys.readouterr().out
    assert main(["doctor"]) == 1


@pytest.mark.seconds
def test_a_join_file_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "join").write_text(f"diloco://127.0.0.1:1/{RUN}#token,{'0' * 64}\n")
    assert main(["doctor", "--join", str(tmp_path / "join")]) == 1
    assert "127.0.0.1:1 cannot be reached" in capsys.readouterr().out
    assert main(["doctor", "--join", str(tmp_path / "nowhere")]) == 2
    assert "not there" in capsys.readouterr().err


@pytest.mark.seconds
def test_options_printed_at_the_syncer_are_accepted_by_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--run-dir", str(tmp_path)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    options = shlex.split(last.partition("plan:")[2])
    assert {"--syncer-cores", "--syncer-memory-rate", "--disk-rate"} <= set(options)
    assert main(["plan", "tiny/gpt", *options]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [(("tiny/gpt",), "DILOCO_JOIN"), (("tiny/train.py",), "a script"), (("--run-dir", "nowhere"), "no such folder")],
)
def test_bad_input(
    words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DILOCO_JOIN", raising=False)
    assert main(["doctor", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("num_bytes", [None, -1, True, 1.5, "8", MAX_PROBE_BYTES + 1])
def test_a_syncer_refuses_invalid_numbers_of_probe_bytes(num_bytes: object) -> None:
    with pytest.raises(CorruptMessageError, match="num_bytes"):
        made_up({"num_bytes": num_bytes})
    assert made_up({"num_bytes": 3}).payload.nbytes == 3
