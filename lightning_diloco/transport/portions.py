"""Send and receive payloads of any size, in portions and over several TCP connections at once.

1. `Portioned` sends a short payload in one call. It cuts a longer payload into portions of at most PORTION_BYTES. Each
   portion is a call with its own deadline. The header gives the offset of the portion's bytes (`at`) and the size of
   the whole payload (`of`).
2. A far link needs several connections ("streams"), because one connection has at most a few MB in flight per round
   trip. Each portion has its own connection. `streams.py` measures the best number of streams.
3. Portions of an upload may arrive in any order. The answer lists the bytes that the syncer does not have (`missing`),
   and the learner sends only those. After a failed call, the caller calls `put` again with the whole payload. If the
   syncer has restarted, the learner sends all bytes again.
4. All portions of a download have the same `mark`, so that they belong to the same update. Each request asks for a part
   of the update, for example the second of four quarters (`span`), from byte `at` on. If the syncer has lost the update
   and now has a newer version, the download fails, and the caller starts it again.
5. Portions are slices of the payload, and the receiver writes them into one buffer. There is no second copy: a tensor
   of this payload uses the same buffer, which takes gigabytes for a fragment of a large model.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from lightning_diloco.errors import CorruptMessageError, TransportError
from lightning_diloco.protocol.intervals import IntervalSet, Ranges
from lightning_diloco.transport.base import Bulk, Connection, Json
from lightning_diloco.transport.frames import MAX_PAYLOAD_BYTES
from lightning_diloco.transport.streams import NumStreams

PORTION_BYTES = MAX_PAYLOAD_BYTES
MAX_GAPS = 64  # listed in one answer
MAX_RANGES = 4096  # of received bytes that do not touch
_OWN = ("at", "of")


class LargeConnection(Connection, Protocol):
    """A `Connection` for payloads of any size, with the time of the last transfer."""

    @property
    def heard_s(self) -> float: ...


class Portioned:
    """A `Connection` that sends payloads in portions over another `Connection`; each portion has its own deadline.

    Args:
        connection: connection for single calls, used from several threads at once.

    Attributes:
        heard_s: when the last portion was transferred, on the monotonic clock.
    """

    def __init__(self, connection: Connection) -> None:
        self.send, self.poll = connection.send, connection.poll
        self.status, self.close = connection.status, connection.close
        self._connection = connection
        self._up, self._down = NumStreams(), NumStreams()
        self._num_downloaded = 0  # bytes of the last payload; the next one is probably as long
        self.heard_s = float("-inf")

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        """See `Connection.put`."""
        num_bytes, began_s = bulk.payload.nbytes, time.monotonic()
        num = self._up.number_for(num_bytes)
        if num == 1 and num_bytes <= PORTION_BYTES:
            answer = self._put(bulk, deadline_s)
        else:
            answer = _Upload(bulk, partial(self._put, deadline_s=deadline_s)).run(num)
        self._up.note(num, num_bytes, time.monotonic() - began_s)
        return answer

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        """See `Connection.get`. A payload that arrived in portions is writable, because only the caller holds it."""
        began_s = time.monotonic()
        num = self._down.number_for(self._num_downloaded)
        whole = _Download(header, partial(self._get, deadline_s=deadline_s)).run(num)
        self._num_downloaded = whole.payload.nbytes
        self._down.note(num, self._num_downloaded, time.monotonic() - began_s)
        return whole

    def _put(self, bulk: Bulk, deadline_s: float) -> Json:
        answer = self._connection.put(bulk, deadline_s=deadline_s)
        self.heard_s = time.monotonic()
        return answer

    def _get(self, header: Json, deadline_s: float) -> Bulk:
        bulk = self._connection.get(header, deadline_s=deadline_s)
        self.heard_s = time.monotonic()
        return bulk


class _Upload:
    """An upload in portions.

    Args:
        bulk: header and whole payload.
        put: uploads a portion.
    """

    def __init__(self, bulk: Bulk, put: Callable[[Bulk], Json]) -> None:
        self._bulk, self._put = bulk, put
        self._missing: Ranges = [(0, bulk.payload.nbytes)]  # at the syncer, by its last answer
        self._waiting: deque[tuple[int, int]] = deque()
        self._answer: Json = {}

    def run(self, num: int) -> Json:
        """Send the missing bytes over `num` streams; return the last answer."""
        while self._missing:
            self._waiting.extend(_portions(self._missing, num))
            _at_once([self._stream] * num)
            if self._missing:  # the syncer lost bytes, or the answers of two streams crossed: ask again
                self._send(self._missing[0][0], self._missing[0][0])
        return self._answer

    def _stream(self) -> None:
        try:
            while (portion := self._next()) is not None:
                self._send(*portion)
        except BaseException:
            self._waiting.clear()  # the other streams end
            raise

    def _next(self) -> tuple[int, int] | None:
        """Return the next portion of which a byte is missing."""
        while True:
            try:
                start, stop = self._waiting.popleft()
            except IndexError:
                return None
            if any(a < stop and start < b for a, b in self._missing):
                return start, stop

    def _send(self, start: int, stop: int) -> None:
        payload = self._bulk.payload
        header = {**self._bulk.header, "at": start, "of": payload.nbytes}
        self._answer = answer = self._put(Bulk(header, payload[start:stop]))
        self._missing = [(a, b) for a, b in answer["missing"]]


class _Download:
    """A download in portions.

    Args:
        header: of the request.
        get: downloads a portion.
    """

    def __init__(self, header: Json, get: Callable[[Json], Bulk]) -> None:
        self._asked, self._get = {**header, "mark": secrets.token_hex(8)}, get
        self._header: Json | None = None
        self._whole = memoryview(b"")
        self._keeping = threading.Lock()

    def run(self, num: int) -> Bulk:
        """Download the whole payload over `num` streams."""
        _at_once([partial(self._stream, k, num) for k in range(num)])
        assert self._header is not None
        return Bulk({name: value for name, value in self._header.items() if name not in _OWN}, self._whole)

    def _stream(self, k: int, num: int) -> None:
        at, stop = 0, 1
        while at < stop:
            bulk = self._get({**self._asked, "span": [k, num], "at": at})
            of = bulk.header["of"]
            at, stop = max(at, of * k // num), of * (k + 1) // num
            end = at + bulk.payload.nbytes
            if bulk.header["at"] != at or not (at < end <= stop or at == end == stop):
                raise CorruptMessageError(
                    f"bytes {bulk.header['at']} to {bulk.header['at'] + bulk.payload.nbytes} of {of} came, but byte "
                    f"{at} must be next, up to {stop}; nothing of it was used; do both sides run the same version?"
                )
            self._keep(bulk, at, of)
            at = end

    def _keep(self, bulk: Bulk, at: int, of: int) -> None:
        header = {**bulk.header, "at": 0}
        with self._keeping:
            if self._header is None:
                self._header = header
                if bulk.payload.nbytes == of > 0:
                    self._whole = bulk.payload
                    return
                self._whole = torch.empty(of, dtype=torch.uint8).numpy().data
            if self._header != header:
                raise TransportError("the update changed while it was downloaded in portions; download it again")
        self._whole[at : at + bulk.payload.nbytes] = bulk.payload


class Received:
    """The bytes of a payload that have arrived; portions arrive in any order and may be repeated.

    Args:
        num_bytes: size of the payload.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._have = IntervalSet()

    @property
    def missing(self) -> Ranges:
        """Ranges of missing bytes. If there are more than MAX_GAPS, the last range extends to the payload's end."""
        gaps = self._have.missing(0, self._num_bytes)
        return gaps if len(gaps) <= MAX_GAPS else [*gaps[: MAX_GAPS - 1], (gaps[MAX_GAPS - 1][0], self._num_bytes)]

    def add(self, at: int, num_bytes: int) -> None:
        """Add a portion.

        Raises:
            CorruptMessageError: the bytes are in too many pieces.
        """
        for gap in self._have.missing(at, at + num_bytes):
            self._have.add(*gap)
        if len(self._have) > MAX_RANGES:
            raise CorruptMessageError(
                f"a payload of {self._num_bytes} bytes came in more than {MAX_RANGES} pieces that do not touch; do "
                "both sides run the same version?"
            )


def place(bulk: Bulk) -> tuple[int, int]:
    """Return the offset of an upload's bytes, and the size of the whole payload.

    Raises:
        CorruptMessageError: the bytes do not lie within the payload.
    """
    at, of = bulk.header.get("at", 0), bulk.header.get("of", bulk.payload.nbytes)
    if type(at) is not int or type(of) is not int or not 0 <= at <= at + bulk.payload.nbytes <= of:
        raise CorruptMessageError(
            f"{bulk.payload.nbytes} bytes at={at!r:.40} of={of!r:.40}; must be integers, with all bytes within `of`; "
            "nothing of it was used; do both sides run the same version?"
        )
    return at, of


def asked_range(header: Json, num_bytes: int) -> tuple[int, int]:
    """Return the range (start, stop) that a request for a portion asks for, in a payload of num_bytes.

    Raises:
        CorruptMessageError: the header is invalid.
    """
    span, at = header.get("span", [0, 1]), header.get("at", 0)
    is_pair = isinstance(span, list) and len(span) == 2 and all(type(x) is int for x in span)
    if not is_pair or not 0 <= span[0] < span[1] or type(at) is not int or at < 0:
        raise CorruptMessageError(
            f"span={span!r:.40}, at={at!r:.40}; span must be [k, n] with 0 <= k < n, at an integer >= 0; do both sides "
            "run the same version?"
        )
    k, n = span
    stop = num_bytes * (k + 1) // n
    start = min(max(at, num_bytes * k // n), stop)
    return start, min(start + PORTION_BYTES, stop)


def _portions(missing: Ranges, num: int) -> Ranges:
    """Cut ranges of bytes into portions, so that `num` streams get about the same number of bytes."""
    size = min(PORTION_BYTES, -(-sum(stop - start for start, stop in missing) // num))
    return [(at, min(at + size, stop)) for start, stop in missing for at in range(start, stop, size)]


def _at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Run all calls at the same time in threads, wait for them, and raise the first error."""
    failed: list[BaseException] = []

    def make(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # raised again in the caller's thread
            failed.append(error)

    # Not a thread pool: at exit, the interpreter would wait for the threads of a pool.
    threads = [threading.Thread(target=make, args=(call,), name="diloco-stream", daemon=True) for call in calls[1:]]
    for thread in threads:
        thread.start()
    make(calls[0])
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
