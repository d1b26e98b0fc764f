"""Payloads in batches: what is declared is what is taken."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.transport import frames
from lightning_diloco.transport.base import Bulk
from lightning_diloco.transport.frames import BATCH_BYTES, Envelope, from_batches, loads, to_batches

PAYLOAD = bytes(range(251)) * 20_000


@pytest.fixture
def envelope() -> Envelope:
    return Envelope.of(Bulk({"a": 1}, memoryview(PAYLOAD)))


@pytest.mark.parametrize("size", [0, 1, BATCH_BYTES - 1, BATCH_BYTES, BATCH_BYTES + 1, len(PAYLOAD)])
def test_batches_join_to_the_payload_at_every_boundary(size):
    bulk = Bulk({"a": 1}, memoryview(PAYLOAD)[:size])
    batches = list(to_batches(bulk.payload))
    assert len(batches) == -(-size // BATCH_BYTES)
    envelope = Envelope.decode(Envelope.of(bulk).encode(), len(PAYLOAD))
    back = from_batches(envelope, batches)
    assert (back.header, back.payload) == (bulk.header, bulk.payload)


def test_batches_share_the_payloads_memory():
    start = pa.py_buffer(PAYLOAD).address
    batches = list(to_batches(memoryview(PAYLOAD)))
    assert [b.column(0).buffers()[1].address - start for b in batches] == [0, BATCH_BYTES, 2 * BATCH_BYTES]


def test_a_wrong_checksum_is_refused(envelope):
    flipped = bytearray(PAYLOAD)
    flipped[3 << 20] ^= 1
    with pytest.raises(CorruptMessageError, match="checksum"):
        from_batches(envelope, to_batches(memoryview(flipped)))


def test_batches_in_another_order_are_refused(envelope):
    first, second, third = to_batches(memoryview(PAYLOAD))
    with pytest.raises(CorruptMessageError, match="checksum"):
        from_batches(envelope, [second, first, third])


def test_a_truncated_payload_is_refused(envelope):
    with pytest.raises(CorruptMessageError, match=f"only {len(PAYLOAD) - 1} bytes came; declared were {len(PAYLOAD)}"):
        from_batches(envelope, to_batches(memoryview(PAYLOAD)[:-1]))


def test_more_than_declared_is_refused_as_soon_as_it_comes(envelope):
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield from to_batches(memoryview(PAYLOAD))

    with pytest.raises(CorruptMessageError, match="more than"):
        from_batches(envelope, endless())
    assert len(taken) == 2


def test_batches_of_another_type_are_refused(envelope):
    column = pa.Array.from_buffers(pa.int8(), 1, [None, pa.py_buffer(b"1")])
    wrong = pa.record_batch([column], names=["bytes"])
    with pytest.raises(CorruptMessageError, match="uint8"):
        from_batches(envelope, [wrong])


def test_an_oversized_declaration_is_refused(envelope):
    with pytest.raises(CorruptMessageError, match=f"{len(PAYLOAD)} bytes was declared; at most 10 are taken"):
        Envelope.decode(envelope.encode(), 10)


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe", b"[]", b"{}", b'{"header":{},"num_bytes":-1,"crc32":0}'])
def test_what_is_no_envelope_is_refused(raw):
    with pytest.raises(CorruptMessageError):
        Envelope.decode(raw, 10)


def test_json_beyond_the_standard_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        frames.dumps({"loss": float("inf")})


def test_a_checksum_is_of_the_payload_alone(envelope):
    assert replace(envelope, header={}).crc32 == Envelope.of(Bulk({"b": 2}, memoryview(PAYLOAD))).crc32


@pytest.mark.parametrize(
    "raw",
    [b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e999}', b'{"a":"\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000],
    ids=lambda raw: raw[:20].decode(),
)
def test_json_that_could_not_be_told_to_anybody_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptMessageError, match="nothing of it was used"):
        loads(raw)


def test_json_beyond_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_JSON_BYTES", 10)
    assert loads(b'{"a":1234}') == {"a": 1234}
    with pytest.raises(CorruptMessageError, match="11 bytes of JSON; at most 10"):
        loads(b'{"a":12345}')
