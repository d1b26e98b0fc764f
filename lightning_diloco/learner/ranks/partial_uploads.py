"""Uploads a contribution over the connections of all ranks: each rank uploads its part of the encoded fragment.

1. Only rank 0 exchanges messages about rounds and fates with the syncer. To upload a contribution, rank 0 uploads the
   first part, and tells every other rank to upload its part with the same header. The syncer joins the parts.
2. Rank 0 sends the checksum of each part to the other ranks. A rank whose part has another checksum uploads nothing.
3. If any rank could not upload its part, the whole upload has failed. Rank 0 then uploads alone for ALONE_S, because it
   holds the whole encoded fragment anyway. So a rank that is cut off for long does not cut off its learner. Rank 0 logs
   a warning. A contribution is uploaded together once. If the syncer then fails and loses it, rank 0 uploads all of it,
   because the other ranks do not keep their parts.
4. Ranks do not send each other the join string, because their groups do not encrypt. Each rank was given it, or reads
   it from the run directory of a syncer that rank 0 has started. If a rank cannot reach the syncer at the start (for
   example a syncer on loopback of another host), rank 0 uploads alone until the learner ends. Both ranks log a warning.
5. If rank 0 dials another syncer than it was given (`rotation.py`), it names it at the start and with each upload, and
   the other ranks dial it, too.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.buffers import bytes_of, tensor_of
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.parts import part_of
from lightning_diloco.errors import DiLoCoError, TransportError
from lightning_diloco.learner.ranks.channel import Channel
from lightning_diloco.learner.shards import ShardedConnection
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk, Json

log = logging.getLogger(__name__)

ALONE_S = 60.0
PART_S = 60.0
GOODBYE_S = 1.0


class PartedConnection:
    """Rank 0's `Connection`; contributions are uploaded over the connections of all ranks.

    Args:
        connection: rank 0's connection.
        orders: channel to the other ranks.
    """

    def __init__(self, connection: ShardedConnection, orders: Channel) -> None:
        self._connection = connection
        self.send, self.poll, self.get = connection.send, connection.poll, connection.get
        self.status, self.close = connection.status, connection.close
        self._put, self._orders = connection.put, orders
        self._alone_until_s = float("-inf")
        self._seqs: dict[int, int] = {}  # per fragment, of the last contribution that was uploaded together

    @property
    def heard_s(self) -> float:
        """See `LargeConnection`."""
        return self._connection.heard_s

    @staticmethod
    def is_possible(reached: Sequence[bool]) -> bool:
        """Return whether all other ranks can reach the syncer; warns if not.

        Args:
            reached: whether each rank can reach the syncer, in order from rank 1.
        """
        if unreached := [rank for rank, reaches in enumerate(reached, start=1) if not reaches]:
            log.warning("ranks %s cannot reach the syncer; rank 0 uploads the contributions of all ranks", unreached)
        return not unreached

    def prepare(self, plan: FragmentPlan, config: RunConfig, dealt: Container[int]) -> None:
        """Set the plan of the run. Call this before the first contribution.

        Args:
            plan: fragment plan of the run.
            config: options of the run.
            dealt: fragments of which each rank has encoded its part.
        """
        self._dealt = dealt
        self._numels = [plan.layout(p, config.block_size).padded_numel for p in range(plan.num_fragments)]
        self._config = config

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        """See `Connection.put`."""
        is_contribution = bulk.header.get("what") == "contribution" and bulk.header.get("error") is None
        if not is_contribution or self._is_alone:
            return self._put(bulk, deadline_s=deadline_s)
        p, seq = bulk.header["ready"]["fragment"], bulk.header["ready"]["seq"]
        if p not in self._dealt or self._seqs.get(p) == seq:
            return self._put(bulk, deadline_s=deadline_s)
        self._seqs[p] = seq
        try:
            self._put_together(bulk, deadline_s)
        except DiLoCoError:
            self._alone_until_s = time.monotonic() + ALONE_S
            log.warning("not all ranks could upload their parts; for %.0f s rank 0 uploads all of them", ALONE_S)
            raise
        return {}

    def end(self) -> None:
        """End `PartSender.run` on the other ranks, unless one of them is still uploading after GOODBYE_S."""
        self._orders.give({"do": "end"}, lambda: None, within_s=GOODBYE_S)

    @property
    def _is_alone(self) -> bool:
        return self._orders.size == 1 or time.monotonic() < self._alone_until_s

    def _put_together(self, bulk: Bulk, deadline_s: float) -> None:
        n, config, payload = self._orders.size, self._config, tensor_of(bulk.payload, torch.uint8)
        numel = self._numels[bulk.header["ready"]["fragment"]]

        def part(k: int) -> memoryview:
            return bytes_of(part_of(payload, k, n, numel=numel, wire=config.wire, block_size=config.block_size))

        checksums = [zlib.crc32(part(k)) for k in range(n)]
        order = {
            "do": "upload",
            "header": bulk.header,
            "checksums": checksums,
            "deadline_s": deadline_s,
            "syncer": self._connection.moved_to,
            "shards": self._connection.shards,
        }
        own = Bulk(_part_header(bulk.header, 0, n), part(0))
        if not self._orders.give(order, partial(self._put, own, deadline_s=deadline_s)):
            raise TransportError(
                "a rank of this learner did not upload its part (its log has the reason); rank 0 sends all parts"
            )


class PartSender:
    """Sender of a rank other than 0: keeps its part of each encoded fragment, and uploads it when rank 0 says so.

    Args:
        orders: channel from rank 0.
        connect: makes the connection to the syncer.
    """

    def __init__(self, orders: Channel, connect: Callable[[JoinAddress], ShardedConnection]) -> None:
        self._orders, self._connect = orders, connect
        self._syncer: ShardedConnection | None = None
        self._kept: dict[int, Tensor] = {}
        self._has_come = threading.Condition()

    def reach(self, address: Callable[[], JoinAddress], moved_to: str | None = None) -> bool:
        """Connect to the syncer; returns whether this rank can find and reach it.

        Args:
            address: returns the address that the ranks were given.
            moved_to: `host:port` of the syncer that rank 0 dials instead; None: it dials the same.
        """
        try:
            self._syncer = self._connect(address())
            if moved_to is not None:
                self._syncer.move_to(moved_to)
            self._syncer.status()
        except DiLoCoError as error:
            log.warning("this rank cannot reach the syncer, so rank 0 uploads its parts: %s", error)
            return False
        return True

    def keep(self, fragment: int, payload: Tensor, numel: int, config: RunConfig) -> None:
        """Keep this rank's part of a whole encoded fragment until it is uploaded or replaced."""
        k, n = self._orders.rank, self._orders.size
        self.keep_part(fragment, part_of(payload, k, n, numel=numel, wire=config.wire, block_size=config.block_size))

    def keep_part(self, fragment: int, part: Tensor) -> None:
        """Keep this part until it is uploaded or replaced."""
        with self._has_come:
            self._kept[fragment] = part
            self._has_come.notify_all()

    def run(self) -> None:
        """Carry out rank 0's orders until rank 0 ends or is gone."""
        order: Json = {}
        with suppress(RuntimeError):  # rank 0 is gone; `Ranks.pulse` reports it
            while order.get("do") != "end":
                order, _ = self._orders.hear()
                self._orders.all_could(order["do"] == "end" or self._send(order))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._syncer is not None:
            self._syncer.close()

    def _send(self, order: Json) -> bool:
        header, k = order["header"], self._orders.rank
        p = header["ready"]["fragment"]
        try:
            part = self._part(p, order["checksums"][k])
            assert self._syncer is not None, "reach() comes first"
            if order["syncer"] is not None:
                self._syncer.move_to(order["syncer"])
            self._syncer.shards = tuple(order["shards"])
            bulk = Bulk(_part_header(header, k, self._orders.size), bytes_of(part))
            self._syncer.put(bulk, deadline_s=order["deadline_s"])
        except DiLoCoError as error:
            log.warning("this rank's part of fragment %d was not uploaded: %s", p, error)
            return False
        return True

    def _part(self, p: int, checksum: int) -> Tensor:
        """Return the part with this checksum. Waits up to PART_S, because this rank may still be encoding it."""
        with self._has_come:
            self._has_come.wait_for(lambda: self._checksum(p) == checksum, PART_S)
            if (found := self._checksum(p)) != checksum:
                raise TransportError(
                    f"the part of fragment {p} that was encoded here has the checksum {found}, that of rank 0 has "
                    f"{checksum}; ranks must hold equal parameters; rank 0 sends its own, this one sends nothing"
                )
            return self._kept.pop(p)

    def _checksum(self, p: int) -> int | None:
        return zlib.crc32(bytes_of(self._kept[p])) if p in self._kept else None


def _part_header(header: Json, k: int, n: int) -> Json:
    return {**header, "part": k, "num_parts": n}
