"""The hosts of one learner: they agree on which of their processes train together.

1. Host 0 leads. Each start of its process is a *rendezvous*, an address and a free port at which the processes of all
   hosts meet. Lightning starts the local ranks of a host.
2. Another host joins a rendezvous once at most. If its process dies, or it has a new keeper, it reports the rendezvous
   as lost. The process of host 0 then has GRACE_S to end by itself: it loses its connection, or leaves in good order.
   After that it is killed, unless its training is done. In both cases its keeper starts it again, which is the next
   rendezvous.
3. A host whose process is for an older rendezvous kills it and joins the new one.
4. If a process is refused (exit code 2) on one host, the learner is refused.
5. Other hosts end after host 0 has ended for good, with its outcome, or when the order says so.

Hosts read each other's events (files.py), so they do not need Ray. Source: our choice, after torchrun's rendezvous.
"""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from lightning_diloco.cli.local.fleet import Outcome
from lightning_diloco.cli.local.interruption import GRACE_S
from lightning_diloco.cli.ray.files import Desk, Order, host_of

Tell = Callable[[str, str], None]

_TICK_S = 0.2


class NoMeetingError(Exception):
    """No rendezvous will come, because the learner has ended or this keeper must go."""


class FirstHost:
    """Host 0 of a learner, or the only host of a process.

    Args:
        address: name or address of this machine for other machines.
        others: desks of the other hosts.
        tell: appends an event to the desk of this host.
    """

    def __init__(self, address: str, others: Sequence[Desk], tell: Tell) -> None:
        self._address, self._tell = address, tell
        self._read_bytes = {desk: desk.num_bytes for desk in others}
        self._rendezvous: str | None = None
        self._begun: set[str] = set()
        self._lost_s = math.inf
        self._is_refused = False

    def meet(self) -> dict[str, str]:
        """Begin a rendezvous; returns the variables of a process that takes part."""
        if not self._read_bytes:
            return {}
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        self._rendezvous, self._lost_s = f"{self._address}:{port} {secrets.token_hex(4)}", math.inf
        self._begun.add(self._rendezvous)
        self._tell("started", self._rendezvous)
        return _variables(self._rendezvous, 0)

    @property
    def is_over(self) -> bool:
        """Whether the process must be killed, because another host has lost the rendezvous."""
        for desk, start in self._read_bytes.items():
            told, self._read_bytes[desk] = desk.events(start)
            self._is_refused |= any(it["event"] == "refused" and it["text"] in self._begun for it in told)
            if any(it["event"] == "lost" and it["text"] == self._rendezvous for it in told):
                self._lost_s = min(self._lost_s, time.monotonic())
        return time.monotonic() > self._lost_s + GRACE_S

    def outcome(self, own: Outcome) -> Outcome:
        """Return the outcome of this host, from that of its process."""
        return "refused" if self._is_refused else own


class OtherHost:
    """Another host of a learner.

    Args:
        run_dir: RUN_DIR.
        name: name of its process; see `host_names`.
        order: order of the learner.
        tell: appends an event to the desk of this host.
        must_end: returns whether the keeper must not wait any longer.
    """

    def __init__(self, run_dir: Path, name: str, order: Order, tell: Tell, must_end: Callable[[], bool]) -> None:
        first, self._rank = host_of(name)
        self._first, self._read_bytes = Desk(run_dir, first), order.since
        self._tell, self._must_end = tell, must_end
        self._leader: str | None = None  # mark of host 0's newest keeper
        self._rendezvous: str | None = None
        told, _ = Desk(run_dir, name).events()  # an earlier keeper may have joined
        self._joined = next((it["text"] for it in reversed(told) if it["event"] == "joined"), None)
        self._refused: str | None = None
        self._ended: tuple[Outcome, float] | None = None  # host 0's outcome, and when this host read it

    def meet(self) -> dict[str, str]:
        """Wait for a rendezvous that this host has not joined, and join it; see `FirstHost.meet`.

        Raises:
            NoMeetingError: there will be none.
        """
        self._hear()
        if self._joined is not None and self._joined == self._rendezvous:
            self._tell("lost", self._joined)
        while self._rendezvous is None or self._rendezvous == self._joined:
            if self._ended is not None or self._must_end():
                raise NoMeetingError
            time.sleep(_TICK_S)
            self._hear()
        self._joined = self._rendezvous
        self._tell("joined", self._joined)
        return _variables(self._joined, self._rank)

    @property
    def is_over(self) -> bool:
        """Whether the process must be replaced, because host 0 has begun another rendezvous."""
        self._hear()
        return self._rendezvous not in (None, self._joined)

    def outcome(self, own: Outcome) -> Outcome:
        """Return the outcome of this host, which is that of host 0."""
        self._hear()
        if own == "refused" and self._refused != self._joined and self._joined is not None:
            self._refused = self._joined
            self._tell("refused", self._joined)
        if self._ended is None or (own == "running" and time.monotonic() < self._ended[1] + GRACE_S):
            return "running"
        return self._ended[0]

    def _hear(self) -> None:
        told, self._read_bytes = self._first.events(self._read_bytes)
        for it in told:
            if it["event"] == "began":
                self._leader, self._rendezvous, self._ended = it["keeper"], None, None
            elif it["keeper"] == self._leader and it["event"] == "started":
                self._rendezvous = it["text"]
            elif it["keeper"] == self._leader and it["event"] == "ended":
                self._ended = cast("Outcome", it["text"]), time.monotonic()


def _variables(rendezvous: str, rank: int) -> dict[str, str]:
    """Return the variables that Lightning's LightningEnvironment reads."""
    address, _, port = rendezvous.partition(" ")[0].rpartition(":")
    return {"MASTER_ADDR": address, "MASTER_PORT": port, "NODE_RANK": str(rank)}
