"""Any other rank of a learner: no protocol; it stages what rank 0 hands on, lands when all do, and uploads its part."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.devices.part import Box, PartPlan
from lightning_diloco.errors import DiLoCoError, JoinError, NonFiniteError, RunOverError
from lightning_diloco.learner.join import MakeDevice
from lightning_diloco.learner.ranks.agreement import Agreement
from lightning_diloco.learner.ranks.group import Ranks
from lightning_diloco.learner.ranks.orders import Orders
from lightning_diloco.learner.ranks.partial_uploads import PartSender
from lightning_diloco.learner.ranks.replicated_device import unpacked
from lightning_diloco.learner.ranks.reshard import Resharder
from lightning_diloco.learner.rotation import Followed
from lightning_diloco.learner.status import LearnerStatus
from lightning_diloco.manifest import ModelDescription, plan_of
from lightning_diloco.process.threads import Crew, Jobs, compute_alone, yield_cores
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.codec import Json
from lightning_diloco.transport.address import JoinAddress, read_join_file
from lightning_diloco.transport.base import Connection
from lightning_diloco.transport.flight import FlightConnection
from lightning_diloco.transport.portions import Portioned

log = logging.getLogger(__name__)

THREADS_S = 3.0
WAIT_S = 0.002


class FollowerLink:
    """What a strategy sees of a run at a rank that is not 0: the methods of `Link`.

    Args:
        ranks: of this learner.
        holds_part: of the parameters, not all of them; then it measures its part of contributions.
        boxes: what each rank holds of each parameter, where they encode together.
        connect: makes the connection.
        join: the join string that all ranks were given; None: rank 0 starts a syncer, and it is in its run directory.
    """

    agreed = Agreement()  # what all ranks know since the last step ended
    is_drained = False

    def __init__(
        self,
        ranks: Ranks,
        *,
        holds_part: bool = False,
        boxes: Sequence[Mapping[str, Box]] | None = None,
        connect: Callable[[JoinAddress], Connection] = FlightConnection,
        join: str | None = None,
    ) -> None:
        self._ranks = ranks
        self._holds_part = holds_part
        self._landing = threading.Lock()
        self._counts: Counter[int] = Counter()
        self._snapshots: dict[int, tuple[int, Any]] = {}
        self._asked_for: Tensor | None = None
        self._crew = Crew(self._fail)
        self._error: BaseException | None = None
        self._is_over = False
        self._staged: dict[int, Any] = {}
        self._adopted: dict[int, Tensor] = {}
        self._orders = Orders()
        self._join_file: Path | None = None
        self._sender = PartSender(self._orders, lambda address: Portioned(Followed(connect, address, self._join_file)))
        self._boxes, self._join = boxes, join
        self._dealer: Resharder | None = None
        self._after: Callable[[], None] | None = None
        self._copies: Jobs | None = None
        self._deals = holds_part

    def start(self, model: ModelDescription, make_device: MakeDevice) -> None:
        """Do what rank 0 says until it has joined.

        Raises:
            JoinError: it could not.
            RunOverError: it could not because the run has ended.
        """
        while self._follow(make_device) != "go":
            pass
        self._crew.start("follower", self._follow_on)
        self._crew.start("uploads", self._sender.run)
        self._crew.start("pulse", partial(self._ranks.pulse, self._crew))
        self._copies = Jobs(self._crew, "copies", yields=False)

    @property
    def data_part(self) -> tuple[int, int] | None:
        """See `Link.data_part`."""
        parts = self.config.data_parts or 1
        return (self.slot % parts, parts) if parts > 1 else None

    # -------------------------------------------------------------------------------------------------------- training

    def begin_step(self, tokens: int, *, is_asked: bool = False, saves: bool = False, stops: bool = False) -> None:
        """See `LeaderLink.begin_step`; when all take a checkpoint, rank 0 says."""
        said = Agreement(tokens=tokens, num_failed=int(self._error is not None), num_asked=int(is_asked), stops=stops)
        self._ranks.begin(said.numbers(self.plan.num_fragments))

    def step(self, tokens: int, unit: str) -> None:
        """Land what was promised."""
        self._boundary()

    def skip_step(self) -> None:
        """See `LeaderLink.skip_step`."""
        self.agreed = Agreement.of(self._ranks.end())

    def finish(self, reason: messages.Reason = "finished", within_s: float | None = None) -> bool:
        """Land what still comes, until rank 0 has left; returns whether it was the last."""
        while True:
            self.begin_step(0)
            agreed = self._boundary()
            if agreed.is_over:
                self._is_over, self.is_drained = True, agreed.is_drained
                return agreed.is_last

    @property
    def num_landings(self) -> int:
        """See `Link.num_landings`."""
        return sum(self._counts.values())

    def _boundary(self) -> Agreement:
        agreed = self.agreed = Agreement.of(self._ranks.end())
        if self._error is not None:
            raise self._error
        if agreed.num_failed:
            raise DiLoCoError("another rank of this learner has stopped; its own output says why; start it again")
        assert self._copies is not None, "start() comes first"
        for p in agreed.land:
            with self._landing:
                if p in self._adopted:
                    self.device.adopt(p, self._adopted.pop(p))
                else:
                    self.device.land(p, self._staged.pop(p))
                self._counts[p] += 1
        if self._deals:
            for p in agreed.snapshot:
                self._snapshots[p] = (self._ranks.num_begun, self.device.snapshot(p))
                self._copies.put(self.device.settle)
            if not self._holds_part:  # see `ReplicatedDevice.snapshot`
                self.device.settle()
        return agreed

    def settle(self) -> None:
        """See `Link.settle`."""
        self.device.settle()

    def set_evaluating(self, evaluating: bool) -> None:
        """Rank 0 says so for all."""
        self.settle()

    def set_loss(self, read: Callable[[], float | None], *, aside: bool) -> None:
        """Rank 0 says its own."""

    def set_eval_loss(self, loss: float) -> None:
        """Rank 0 says its own."""

    def stop_run(self, reason: str) -> None:
        """Rank 0 says so."""

    def held_up(self, for_s: float) -> None:
        """Rank 0 counts its own."""

    def report(self, eval_loss: float | None, reason: str | None = None) -> None:
        """Rank 0 does."""

    def standing(self) -> LearnerStatus:
        """Nobody looks at the bar of this rank."""
        return LearnerStatus(versions=(0, 0), staleness_versions=0, in_flight=(), num_learners=None, offline_s=None)

    def metrics(self) -> dict[str, float]:
        """Rank 0 logs."""
        return {}

    def close(self) -> None:
        """Let go of the threads; one that still waits for rank 0 ends with the process."""
        if self._crew.stopping.is_set():
            return
        self._crew.stopping.set()
        if self._copies is not None:
            self._copies.stop()
        if running := self._crew.join(THREADS_S):
            log.warning("still waiting for rank 0, and left alone: %s", ", ".join(running))
        elif self._is_over:
            self._ranks.close()
            self._orders.close()
        self._sender.close()

    # -------------------------------------------------------------------------------------------------------- commands

    def _follow_on(self) -> None:
        compute_alone()
        yield_cores()
        try:
            while self._follow() != "end":
                pass
        except RuntimeError as error:  # rank 0 is gone; what it had said is told by the pulse
            if not self._crew.stopping.is_set():
                raise DiLoCoError(f"rank 0 of this learner is gone ({error}); start the learner again") from error

    def _follow(self, make_device: MakeDevice | None = None) -> str:
        """Do one thing that rank 0 says; returns its name."""
        command, payload = self._ranks.listen()
        try:
            self._do(command, payload, make_device)
        except BaseException:
            self._ranks.answer(False)
            raise
        self._ranks.answer(True)
        if self._asked_for is not None:
            self._ranks.deliver(self._asked_for)
            self._asked_for = None
        if self._after is not None:
            self._after()
            self._after = None
        if command["do"] == "fail":
            self._is_over = True
            if command["is_over"]:
                raise RunOverError(command["why"])
            raise JoinError(f"rank 0 of this learner could not join: {command['why']}")
        return str(command["do"])

    def _do(self, command: Json, payload: Tensor, make_device: MakeDevice | None) -> None:
        p = command.get("fragment", -1)
        match command["do"]:
            case "plan":
                assert make_device is not None
                self.plan, self.config = plan_of(command)
                self.device = make_device(self.plan, self.config)
            case "adopt":
                self.device.adopt(p, payload.view(torch.float32))
                self._counts[p] += 1
            case "values":
                self._asked_for = self.device.local_values(p)
            case "anchor":
                self._asked_for = self._counted_anchor(p)
            case "delta":
                self._asked_for = self.device.delta(self._snapshot(p, command["boundary"]))  # type: ignore[attr-defined]
            case "encode":
                self._after = partial(self._encode, p, command["boundary"])
            case "deal":
                delta_L = self.device.delta(self._snapshot(p, command["boundary"]))  # type: ignore[attr-defined]
                self._after = partial(self._deal, p, delta_L)
            case "reach":
                self._asked_for = torch.tensor([float(self._sender.reach(partial(self._address, command["run_dir"])))])
            case "expect":
                self._adopted[p] = payload.view(torch.float32)
            case "stage":
                self._staged[p] = self.device.stage(p, unpacked(command, payload))
            case "go":
                self.learner_id, self.run, self.incarnation = command["learner"], command["run"], command["incarnation"]
                self.is_late = command["is_late"]
                self._deals |= command["deals"]
                self.agreed = Agreement(fleet_tokens=command["fleet_tokens"])
                self.slot, self.data_seed = command["slot"], command["data_seed"]

    def _counted_anchor(self, p: int) -> Tensor:
        """How often a fragment has landed, then this rank's anchor; see `LearnerMetrics._mark`."""
        while True:
            before = self._landed(p)
            anchor_L = self.device.anchor(p)
            if self._landed(p) == before:
                return torch.cat((torch.tensor([before], dtype=torch.float32), anchor_L))

    def _landed(self, p: int) -> int:
        with self._landing:
            return self._counts[p]

    def _address(self, run_dir: str | None) -> JoinAddress:
        """Known here, as all ranks were given the same, or from a file that only this user can read."""
        self._join_file = None if run_dir is None else Path(run_dir) / "join"
        if self._join is not None:
            return JoinAddress.parse(self._join)
        assert self._join_file is not None, "settings were compared"
        return read_join_file(self._join_file)

    def _encode(self, p: int, boundary: int) -> None:
        """All of it, of parameters equal to those of rank 0, which does the same meanwhile; keep this rank's part."""
        try:
            payload = self.device.encode(self._snapshot(p, boundary)).payload
        except NonFiniteError:
            return  # rank 0 finds the same, and tells the syncer
        numel = self.plan.layout(p, self.config.block_size).padded_numel
        self._sender.keep(p, payload, numel, self.config)

    def _deal(self, p: int, delta_L: Tensor) -> None:
        """With all other ranks; keep the part that this one encoded."""
        if self._dealer is None:
            assert self._boxes is not None, "ranks with parts that are not boxes do not deal"
            plans = [PartPlan(self.plan, each, self.config.block_size) for each in self._boxes]
            self._dealer = Resharder(self._ranks, plans, self.config)
        self._sender.keep_part(p, self._dealer.bare(self._dealer.part(p, delta_L)))

    def _snapshot(self, p: int, boundary: int) -> Any:
        """The one of this boundary; training here may still be on its way to it."""
        while (found := self._snapshots.get(p, (0, None)))[0] < boundary:
            if self._crew.stopping.wait(WAIT_S):
                raise DiLoCoError("this rank ends before the snapshot that rank 0 asks for; nothing is to be done")
        if found[0] > boundary:
            raise DiLoCoError(
                f"rank 0 asks for fragment {p} as it was at step boundary {boundary}, and this rank has taken it again "
                f"at {found[0]} since; start the learner again"
            )
        return found[1]

    def _fail(self, error: BaseException) -> None:
        """Keep the first error for the training thread."""
        if self._error is None and not self._crew.stopping.is_set():
            self._error = error
            log.error("this rank stops: %s", error)

    plan: FragmentPlan
    config: RunConfig
    device: FragmentDevice[Any, Any]
    learner_id: str
    run: str
    incarnation: int
    is_late: bool
    slot: int
    data_seed: int
    own_run_dir = None
