"""Payloads in slices: the received bytes must agree with the declaration."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.transport import frames
from lightning_diloco.transport.base import Bulk
from lightning_diloco.transport.frames import SLICE_BYTES, Envelope, from_slices, loads, to_slices

PAYLOAD = bytes(range(251)) * 20_000


@pytest.fixture
def envelope() -> Envelope:
    return Envelope.of(Bulk({"a": 1}, memoryview(PAYLOAD)))


@pytest.mark.parametrize("size", [0, 1, SLICE_BYTES - 1, SLICE_BYTES, SLICE_BYTES + 1, len(PAYLOAD)])
def test_slices_join_to_the_payload_at_every_boundary(size):
    bulk = Bulk({"a": 1}, memoryview(PAYLOAD)[:size])
    slices = list(to_slices(bulk.payload))
    assert len(slices) == -(-size // SLICE_BYTES)
    envelope = Envelope.decode(Envelope.of(bulk).encode(), len(PAYLOAD))
    back = from_slices(envelope, slices)
    assert (back.header, back.payload) == (bulk.header, bulk.payload)


def test_slices_share_the_payloads_memory():
    start = pa.py_buffer(PAYLOAD).address
    slices = list(to_slices(memoryview(PAYLOAD)))
    assert [part.address - start for part in slices] == [0, SLICE_BYTES, 2 * SLICE_BYTES]


def test_a_wrong_checksum_is_refused(envelope):
    flipped = bytearray(PAYLOAD)
    flipped[3 << 20] ^= 1
    with pytest.raises(CorruptMessageError, match="checksum"):
        from_slices(envelope, to_slices(memoryview(flipped)))


def test_slices_in_another_order_are_refused(envelope):
    first, second, third = to_slices(memoryview(PAYLOAD))
    with pytest.raises(CorruptMessageError, match="checksum"):
        from_slices(envelope, [second, first, third])


def test_a_truncated_payload_is_refused(envelope):
    with pytest.raises(CorruptMessageError, match=f"only {len(PAYLOAD) - 1} bytes came; declared were {len(PAYLOAD)}"):
        from_slices(envelope, to_slices(memoryview(PAYLOAD)[:-1]))


def test_bytes_beyond_the_declared_length_are_refused_at_once(envelope):
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield from to_slices(memoryview(PAYLOAD))

    with pytest.raises(CorruptMessageError, match="more than"):
        from_slices(envelope, endless())
    assert len(taken) == 2


def test_a_batch_without_bytes_is_refused(envelope):
    with pytest.raises(CorruptMessageError, match="has no bytes"):
        from_slices(envelope, [None])


def test_batches_with_columns_are_refused():
    with pytest.raises(CorruptMessageError, match="columns"):
        frames.check_schema(pa.schema([("bytes", pa.uint8())]))


def test_an_oversized_declaration_is_refused(envelope):
    with pytest.raises(CorruptMessageError, match=f"{len(PAYLOAD)} bytes was declared; a call takes at most 10"):
        Envelope.decode(envelope.encode(), 10)


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe", b"[]", b"{}", b'{"header":{},"num_bytes":-1,"crc32":0}'])
def test_an_invalid_envelope_is_refused(raw):
    with pytest.raises(CorruptMessageError):
        Envelope.decode(raw, 10)


def test_json_beyond_the_standard_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        frames.dumps({"loss": float("inf")})


def test_a_checksum_covers_only_the_payload(envelope):
    assert replace(envelope, header={}).crc32 == Envelope.of(Bulk({"b": 2}, memoryview(PAYLOAD))).crc32


@pytest.mark.parametrize(
    "raw",
    [b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e999}', b'{"a":"\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000],
    ids=lambda raw: raw[:20].decode(),
)
def test_json_that_cannot_be_encoded_again_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptMessageError, match="nothing of it was used"):
        loads(raw)


def test_json_beyond_the_limit_is_refused_before_parsing() -> None:
    assert loads(b'{"a":1234}', 10) == {"a": 1234}
    with pytest.raises(CorruptMessageError, match="11 bytes of JSON; at most 10"):
        loads(b'{"a":12345}', 10)
