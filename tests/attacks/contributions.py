"""Attacks by a learner that has the token: false contributions and false claims. Each attack takes a joined peer.

No attack raises an error by itself, because the answers of the syncer are ignored.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.core.quantize import encode
from lightning_diloco.manifest import plan_of
from lightning_diloco.protocol import messages
from lightning_diloco.transport.base import Bulk, Connection
from tests.fuzz.target import Peer, message_fields

TOKENS, STEPS, STEP_S = 64, 6, 0.01
HUGE, CLAIMED = 6.7e33, 2**40
Values = Callable[[int, int], Tensor]  # number of elements, number of the contribution


class Contributor(Peer):
    """Opens rounds and sends arbitrary contributions to them.

    Args:
        connection: its connection.
        learner: its learner id.
    """

    def __init__(self, connection: Connection, learner: str = "mad") -> None:
        super().__init__(connection, learner)
        self.tokens = self.num_sent = self.step = 0
        self.versions: tuple[int, ...] = ()
        self.newest: list[int] = []
        self._starts: dict[int, int] = {}
        self._merged: dict[int, int] = {}  # end of the merged tokens; nothing lands here
        self._refused = 0
        self._seqs = itertools.count(1)

    def join(self) -> messages.Welcome:
        """Join the run."""
        welcome = super().join()
        self.plan, self.config = plan_of(welcome.manifest)
        self.versions, self.newest = tuple(welcome.versions), list(welcome.versions)
        return welcome

    def hear(self, kind: Any, again: messages.FromLearner | None = None, **wanted: Any) -> Any:
        """See `Peer.hear`; commits are noted."""
        while True:
            heard = super().hear((kind, messages.Commit), again)
            if isinstance(heard, messages.Commit):
                self.newest[heard.fragment] = heard.version
            elif all(getattr(heard, name) == value for name, value in wanted.items()):
                return heard

    def heartbeat(self, step_s: float = STEP_S) -> messages.Heartbeat:
        """Report that this learner steps."""
        pending = tuple(
            tuple((a, b) for a, b in ((0, self._merged.get(p, 0)), (self._starts.get(p, 0), self.tokens)) if a < b)
            for p in range(len(self.versions))
        )
        books = messages.Progress(self.step, self.tokens, self.versions, pending, {"refused": self._refused})
        return messages.Heartbeat("stepping", books, step_s, 1e3)

    def contribute(self, values: Values, *, times: int, tokens: int = TOKENS, steps: int = STEPS) -> None:
        """Send this number of contributions to each fragment."""
        for _ in range(times):
            self.step, self.tokens = self.step + STEPS, self.tokens + tokens
            self.say(self.heartbeat())
            for p in range(len(self.versions)):
                self._contribute(p, values, steps)
        self.say(self.heartbeat())

    def _contribute(self, p: int, values: Values, steps: int) -> None:
        intent = messages.Intent(p, STEP_S)
        self.say(intent)
        self.hear(messages.Announce, intent)
        start = self._starts.get(p, 0)
        ready = messages.Ready(p, next(self._seqs), self.newest[p], 0, start, self.tokens, steps)
        about = {"wire": self.config.wire, "block_size": self.config.block_size}
        numel = self.plan.layout(p, self.config.block_size).padded_numel
        payload = encode(values(numel, self.num_sent), name="x", **about)
        self.say(ready)
        header = {"session": self.session, "ready": message_fields(ready)}
        self.connection.put(Bulk(header, bytes_of(payload)), deadline_s=5.0)
        self.num_sent += 1
        self._starts[p] = self.tokens
        asked, told = messages.AskFate(p, ready.seq), "unknown"
        while told in ("unknown", "held"):
            self.say(asked, intent)
            told = self.hear(messages.FateIs, fragment=p, seq=ready.seq).fate
        if told == "merged":
            self._merged[p] = ready.stop
        else:
            self._refused += ready.tokens


def _random(norm: float) -> Values:
    def values(numel: int, number: int) -> Tensor:
        noise = torch.randn(numel, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        return (noise * (norm / noise.norm())).float()

    return values


def random_directions(peer: Contributor) -> None:
    """Send contributions that are a thousand times longer than usual."""
    peer.contribute(_random(1e4), times=4)


def huge_values(peer: Contributor) -> None:
    """Send finite but huge values."""
    peer.contribute(_random(HUGE), times=4)


def zeros(peer: Contributor) -> None:
    """Send contributions of zeros."""
    peer.contribute(lambda numel, number: torch.zeros(numel), times=4)


def many_steps(peer: Contributor) -> None:
    """Send long contributions that claim many steps."""
    peer.contribute(_random(1e4), times=4, steps=2**40)


def many_tokens(peer: Contributor) -> None:
    """Report a token counter that no batch size can explain."""
    peer.tokens, peer.step = CLAIMED, 1
    for _ in range(5):
        peer.say(peer.heartbeat())
    peer.say(messages.Ready(0, 1, peer.versions[0], 0, 0, CLAIMED, 1))
    peer.hear(messages.Rejected, peer.heartbeat())


def generation_claims(peer: Contributor) -> None:
    """Claim generations and versions that do not exist, in its own session and in one that is joining."""
    for connection in range(2, 30):
        known = tuple(messages.Mark(connection, 2**30, "0" * 64, "0" * 32) for _ in peer.versions)
        peer.say(messages.Hello(peer.learner, connection, 1, {}, known=known, proof="0" * 32))
        nothing = ((),) * len(peer.versions)
        books = messages.Progress(1, 1, (2**30,) * len(peer.versions), nothing, {}, 2**30)
        peer.say(messages.Heartbeat("stepping", books, STEP_S, 1e3))
        peer.say(messages.Ready(0, connection, 2**30, 2**30, 0, 1, 1))


def long_steps(peer: Contributor, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Report steps of an hour, so that rounds wait, and never become ready."""
    until_s, cursor = time.monotonic() + 10.0, 0
    while time.monotonic() < until_s and not is_enough():
        peer.step += 1
        intents = [messages.Intent(p, 3600.0, 3600.0, 3600.0) for p in range(len(peer.versions))]
        peer.say(peer.heartbeat(3600.0), *intents)
        cursor = peer.connection.poll(peer.session, cursor, 0.01).cursor


ATTACKS: dict[str, Callable[[Contributor], None]] = {
    attack.__name__: attack
    for attack in (random_directions, huge_values, zeros, many_steps, many_tokens, generation_claims, long_steps)
}
