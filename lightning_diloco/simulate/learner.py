"""One simulated learner process: its state machine after the join, and the values that its threads would hold.

Parameters and anchors are integers. Training n tokens adds n to the parameters of every fragment. Under "carry",
`param - anchor` must therefore always equal the pending tokens, which reveals lost or repeated tokens immediately.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lightning_diloco.protocol.actions import Fetch, Promise
from lightning_diloco.protocol.data_ranges import Piece
from lightning_diloco.protocol.learner.machine import LearnerState
from lightning_diloco.simulate.reading import Reader
from lightning_diloco.simulate.settings import Pace


@dataclass(frozen=True, slots=True)
class Update:
    """A fetched update: a full value or an increment of the anchor, and this learner's own merged contribution."""

    full: int | None
    increment: int
    sent: int


@dataclass(slots=True)
class SimulatedLearner:
    """One learner process.

    Args:
        connected_s: when the network was last restored.
        boot: number of the syncer start to which it last connected.
        is_cut, is_deaf: whether the network carries nothing, or nothing from the syncer.
        dies_in: it is killed after this number of its actions, before the next one; None: it is not.
        params, anchors: values per fragment.
        kept: sent values by (fragment, seq).
        staged: the last fetched update, per fragment.
        landings: (fragment, version) in order; kept while invariants are checked.
        is_last: answer to its leave; None before.
        num_interruptions: how often its step was discarded.
        promise: actions of its ranks at the next boundary.
        uploads_until_s: time at which the uploads that wait for its link have ended.
        fetches: downloads that wait for its link.
        is_fetching: whether a download is under way.
    """

    name: str
    session: str
    pace: Pace
    state: LearnerState | None = None
    reader: Reader | None = None
    is_stepping: bool = False
    is_cut: bool = False
    is_deaf: bool = False
    is_dead: bool = False
    dies_in: int | None = None
    connected_s: float = 0.0
    connection: int = 0
    boot: int = 0
    error: str | None = None
    is_last: bool | None = None
    busy_until_s: float = 0.0
    bad_payload: bool = False
    params: list[int] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    kept: dict[tuple[int, int], int] = field(default_factory=dict)
    staged: dict[int, tuple[Update, str]] = field(default_factory=dict)
    adopts: dict[int, bool] = field(default_factory=dict)
    landings: list[tuple[int, int]] = field(default_factory=list)
    num_interruptions: int = 0
    promise: Promise = field(default_factory=lambda: Promise((), ()))
    uploads_until_s: float = 0.0
    fetches: deque[Fetch] = field(default_factory=deque)
    is_fetching: bool = False

    @property
    def is_gone(self) -> bool:
        """Return whether the process was killed, has left, or has stopped with an error."""
        return self.is_dead or self.is_last is not None or self.error is not None

    def train(self, tokens: int) -> tuple[Piece, ...]:
        self.params = [param + tokens for param in self.params]
        if self.pace.data is None or self.state is None:
            return ()
        if self.reader is None:
            self.reader = Reader(self.pace.data)
        return self.reader.read(self.state.lessee, tokens)

    def snapshot(self, p: int, seq: int) -> None:
        self.kept[p, seq] = self.params[p] - self.anchors[p]

    def adopt(self, p: int, value: int, digest: str) -> None:
        self.params[p] = self.anchors[p] = value
        self.digests[p] = digest

    def land(self, p: int) -> None:
        """Land the staged update as devices do: carry keeps progress that was not merged, other rules drop it."""
        update, digest = self.staged.pop(p)
        anchor = update.full if update.full is not None else self.anchors[p] + update.increment
        progress = self.params[p] - self.anchors[p] - update.sent
        self.adopt(p, anchor, digest)
        if self.pace.align == "carry" and not self.adopts[p]:
            self.params[p] += progress
