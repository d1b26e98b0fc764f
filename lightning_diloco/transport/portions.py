"""Payloads of any size, sent in portions that each have their own deadline.

1. A payload up to PORTION_BYTES is one call. A longer one is several calls; the header of each gives the offset of its
   bytes (`at`) and the size of the whole payload (`of`).
2. The answer to an upload says how many bytes the syncer has (`have`), and the sender continues there. After a failed
   call, `put` is called again with the payload, and only the missing bytes are sent; a restarted syncer gets all.
3. The answer to a download identifies the payload (`mark`), and the next request asks to continue it. If the syncer
   cannot continue it, it starts another payload (`at` is 0).
4. Portions are slices of the payload, and are received into one buffer, so there is no second copy.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.transport.base import Bulk, Connection, Json
from lightning_diloco.transport.frames import MAX_PAYLOAD_BYTES

PORTION_BYTES = MAX_PAYLOAD_BYTES
_PORTION = ("at", "of", "mark")


class LargeConnection(Connection, Protocol):
    """A `Connection` for payloads of any size, with the time of the last transfer."""

    @property
    def heard_s(self) -> float: ...


class Portioned:
    """Implements `Connection` on top of another one; a deadline applies to each portion.

    Attributes:
        heard_s: when the last portion was transferred, on the monotonic clock.
    """

    def __init__(self, connection: Connection) -> None:
        self.send, self.poll = connection.send, connection.poll
        self.status, self.close = connection.status, connection.close
        self._connection = connection
        self.heard_s = float("-inf")

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        """See `Connection.put`."""
        whole, have = bulk.payload, 0
        if whole.nbytes <= PORTION_BYTES:
            return self._put(bulk, deadline_s)
        while have < whole.nbytes:
            header = {**bulk.header, "at": have, "of": whole.nbytes}
            answer = self._put(Bulk(header, whole[have : have + PORTION_BYTES]), deadline_s)
            have = answer["have"]
        return answer

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        """See `Connection.get`; a payload that came in portions is writable."""
        bulk, num_bytes = self._get(header, deadline_s), 0
        if "of" not in bulk.header:
            return bulk
        while True:
            at = bulk.header["at"]
            if at == 0:
                whole, num_bytes = torch.empty(bulk.header["of"], dtype=torch.uint8).numpy().data, 0
            end = at + bulk.payload.nbytes
            if at != num_bytes or not at < end <= whole.nbytes:
                raise CorruptMessageError(
                    f"bytes {at} to {end} of {whole.nbytes} came, but byte {num_bytes} must be next; nothing of it was "
                    "used; do both sides run the same version?"
                )
            whole[at:end] = bulk.payload
            if (num_bytes := end) == whole.nbytes:
                return Bulk({name: value for name, value in bulk.header.items() if name not in _PORTION}, whole)
            bulk = self._get({**header, "at": num_bytes, "mark": bulk.header["mark"]}, deadline_s)

    def _put(self, bulk: Bulk, deadline_s: float) -> Json:
        answer = self._connection.put(bulk, deadline_s=deadline_s)
        self.heard_s = time.monotonic()
        return answer

    def _get(self, header: Json, deadline_s: float) -> Bulk:
        bulk = self._connection.get(header, deadline_s=deadline_s)
        self.heard_s = time.monotonic()
        return bulk


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
