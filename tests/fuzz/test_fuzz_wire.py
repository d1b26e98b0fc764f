"""Raw Flight calls against a live server: wrong tokens, odd bytes, torn and false streams. All are refused without
effect.

There are fewer examples than for messages, because each is a call over a socket: 300 in the slow suite, in this
process; 5,000 with `-m fuzz`, against a separate syncer process whose memory is measured.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyarrow import flight

from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.flight import FlightConnection, FlightServer
from lightning_diloco.transport.frames import SCHEMA
from tests.e2e.conftest import Processes, until
from tests.fuzz.strategies import control_messages, json_objects, plain_ready
from tests.fuzz.target import NUM_FRAGMENTS, OPTIONS, Honest, Target
from tests.transport.conftest import raw_client

TOKEN = "a-token-nobody-should-see"
CALL_S = 5.0
LIMIT_BYTES = 1 << 16
MAX_GROWTH_BYTES = 32 << 20

odd_json = st.sampled_from(
    [b"", b"{", b"[]", b"null", b'{"a":NaN}', b'{"a":1e999}', b'{"session":"\\ud800"}', b"\xff\xfe", b"[" * 100_000,
     b'{"a":' * 50_000, b"1" * 5000, b'{"session":1,"messages":[1]}', b'{"session":"x","messages":"y"}',
     b'{"session":"x","cursor":"y","wait_s":1}', b'{"session":"x","cursor":1,"wait_s":"y"}']
)  # fmt: skip
bodies = odd_json | st.binary(max_size=200) | json_objects.map(lambda value: json.dumps(value).encode())
sends = st.lists(control_messages, max_size=3).map(
    lambda messages: json.dumps({"session": "stranger", "messages": messages}).encode()
)
actions = st.tuples(
    st.sampled_from(["send", "poll", "status", "", "reset"])
    | st.text(max_size=8, alphabet=st.characters(codec="utf-8")),
    bodies | sends,
)
tickets = bodies


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, pa.Schema, list[bytes]]:
    """Return an envelope and a stream of batches that do not belong together."""
    payload = draw(st.binary(max_size=200))
    declared = draw(st.sampled_from([len(payload), 0, len(payload) + 1, LIMIT_BYTES + 1, 2**62, -1, "9", None, 1.5]))
    checksum = draw(st.sampled_from([zlib.crc32(payload) ^ 1, "x", None, -1]))
    if declared != len(payload):
        checksum = zlib.crc32(payload)
    header = draw(json_objects | plain_ready.map(lambda ready: {"session": "stranger", "ready": ready}))
    envelope = json.dumps({"header": header, "num_bytes": declared, "crc32": checksum}).encode()
    schema = draw(st.sampled_from([SCHEMA, pa.schema([("bytes", pa.uint8())]), pa.schema([("x", pa.utf8())])]))
    pieces = [payload[:10], payload[10:]]
    return draw(st.just(envelope) | bodies), schema, pieces


class Intruder:
    """A raw Flight client that passes the handshake and sends this token."""

    def __init__(self, address: JoinAddress, token: str) -> None:
        self._client = raw_client(address)
        self._options = flight.FlightCallOptions(
            timeout=CALL_S, headers=[(b"authorization", f"Bearer {token}".encode("utf-8", "replace"))]
        )

    def act(self, name: str, body: bytes) -> None:
        list(self._client.do_action(flight.Action(name, body), self._options))

    def get(self, ticket: bytes) -> None:
        self._client.do_get(flight.Ticket(ticket), self._options).read_all()

    def put(self, envelope: bytes, schema: pa.Schema, pieces: list[bytes]) -> None:
        descriptor = flight.FlightDescriptor.for_command(envelope)
        writer, reader = self._client.do_put(descriptor, schema, self._options)
        with contextlib.closing(writer):
            for piece in pieces:
                columns = [pa.array([None], kind) for kind in schema.types]
                writer.write_with_metadata(pa.RecordBatch.from_arrays(columns, schema=schema), pa.py_buffer(piece))
            writer.done_writing()
            reader.read()

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Target, FlightServer]]:
    target = Target(tmp_path)
    server = FlightServer(
        target.service, "127.0.0.1:0", token=TOKEN, max_payload_bytes=LIMIT_BYTES, on_error=target.reported.append
    )
    with server:
        target.num_threads = threading.active_count()
        yield target, server
    target.service.stop()


def make_calls(address: JoinAddress, num_calls: int, after_each: Callable[[], None]) -> None:
    """Make each call once with the token, and once with a wrong token."""
    intruder, stranger = Intruder(address, address.token), Intruder(address, "wrong")
    calls = st.tuples(st.just("act"), actions) | st.tuples(st.just("get"), st.tuples(tickets))
    calls |= st.tuples(st.just("put"), streams())

    @settings(max_examples=num_calls, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(calls)
    def run(call: tuple[str, Any]) -> None:
        how, arguments = call
        with contextlib.suppress(flight.FlightError, pa.ArrowException):
            getattr(intruder, how)(*arguments)
        with pytest.raises(flight.FlightUnauthenticatedError):
            getattr(stranger, how)(*arguments)
        after_each()

    run()
    for client in (intruder, stranger):
        client.close()


@pytest.mark.slow
def test_odd_calls_are_refused_and_do_not_affect_the_honest_learner(served: tuple[Target, FlightServer]) -> None:
    target, server = served

    def check() -> None:
        assert target.reported == []

    make_calls(server.join_address("run"), 300, check)
    target.check()
    connection = FlightConnection(server.join_address("run"))
    assert connection.status()["learners"]
    connection.close()


@pytest.mark.fuzz
def test_a_syncer_process_survives_thousands_of_odd_calls_in_bounded_memory(processes: Processes) -> None:
    options = [word for name, value in OPTIONS.items() for word in ("--" + name.replace("_", "-"), value)]
    syncer = processes.start(
        "syncer", "-m", "lightning_diloco.cli.main", "syncer", "--run-dir", processes.run_dir, *options
    )
    until((processes.run_dir / "join").exists, "the join file", processes)
    address = processes.address
    honest = Honest(FlightConnection(address))
    honest.join()
    count = itertools.count(1)

    def train_now_and_then() -> None:
        if next(count) % 100 == 0:
            honest.train()

    make_calls(address, 500, train_now_and_then)
    memory = psutil.Process(syncer.pid).memory_info
    warm_bytes = memory().rss
    make_calls(address, 5_000, train_now_and_then)
    assert memory().rss - warm_bytes < MAX_GROWTH_BYTES
    assert "Traceback" not in processes.logs()
    assert honest.connection.status()["ledger"]["merged"] == honest.tokens * NUM_FRAGMENTS > 0
    honest.leave()
    syncer.terminate()
    assert processes.end(syncer) == 0
    summary = processes.summary()
    assert summary["ledger_exact"]
    assert summary["tokens_merged"] == honest.tokens * NUM_FRAGMENTS
