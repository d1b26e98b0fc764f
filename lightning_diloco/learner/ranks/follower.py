"""Any other rank of a learner: no protocol; it stages what rank 0 hands on, lands when all do, and uploads its part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.errors import DiLoCoError, JoinError, RunOverError
from lightning_diloco.learner.join import MakeDevice
from lightning_diloco.learner.ranks.agreement import Agreement
from lightning_diloco.learner.ranks.group import Ranks
from lightning_diloco.learner.ranks.partial_uploads import PartSender
from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice
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


class FollowerLink:
    """What a strategy sees of a run at a rank that is not 0: the methods of `Link`.

    Args:
        ranks: of this learner.
        boxes, kind: see `LeaderLink`.
        connect: makes the connection.
        join: the join string that all ranks were given; None: rank 0 starts a syncer, and it is in its run directory.
    """

    agreed = Agreement()  # what all ranks know since the last step ended
    is_drained = False

    def __init__(
        self,
        ranks: Ranks,
        *,
        boxes: Sequence[Mapping[str, Any]] = (),
        kind: type[ReplicatedDevice] = ReplicatedDevice,
        connect: Callable[[JoinAddress], Connection] = FlightConnection,
        join: str | None = None,
    ) -> None:
        self._ranks = ranks
        self._crew = Crew(self._fail)
        self._error: BaseException | None = None
        self._is_over = False
        self._join, self._join_file = join, None
        self._sender = PartSender(ranks.uploads, lambda address: Portioned(Followed(connect, address, self._join_file)))
        self._kind = partial(kind, ranks=ranks, boxes=boxes, stopping=self._crew.stopping, sender=self._sender)
        self._copies: Jobs | None = None

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
        return self.device.num_landings

    def _boundary(self) -> Agreement:
        agreed = self.agreed = Agreement.of(self._ranks.end())
        if self._error is not None:
            raise self._error
        if agreed.num_failed:
            raise DiLoCoError("another rank of this learner has stopped; its own output says why; start it again")
        assert self._copies is not None, "start() comes first"
        self.device.make(agreed.land, agreed.snapshot)
        if agreed.snapshot:
            self._copies.put(self.device.settle)
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
            after = self._do(command, payload, make_device)
        except BaseException:
            self._ranks.answer(False)
            raise
        self._ranks.answer(True)
        after()
        if command["do"] == "fail":
            self._is_over = True
            if command["is_over"]:
                raise RunOverError(command["why"])
            raise JoinError(f"rank 0 of this learner could not join: {command['why']}")
        return str(command["do"])

    def _do(self, command: Json, payload: Tensor, make_device: MakeDevice | None) -> Callable[[], object]:
        """Returns what comes after the answer."""
        match command["do"]:
            case "plan":
                assert make_device is not None
                self.plan, self.config = plan_of(command)
                self.device = self._kind(make_device(self.plan, self.config), plan=self.plan, config=self.config)
            case "reach":
                reaches = self._sender.reach(partial(self._address, command["run_dir"]))
                return partial(self._ranks.deliver, torch.tensor([float(reaches)]))
            case "go":
                self.learner_id, self.run, self.incarnation = command["learner"], command["run"], command["incarnation"]
                self.is_late = command["is_late"]
                self.device.deals = command["deals"]
                self.agreed = Agreement(fleet_tokens=command["fleet_tokens"])
                self.slot, self.data_seed = command["slot"], command["data_seed"]
            case "fail" | "end":
                pass
            case _:
                return self.device.follow(command, payload)
        return lambda: None

    def _address(self, run_dir: str | None) -> JoinAddress:
        """Known here, as all ranks were given the same, or from a file that only this user can read."""
        self._join_file = None if run_dir is None else Path(run_dir) / "join"
        if self._join is not None:
            return JoinAddress.parse(self._join)
        assert self._join_file is not None, "settings were compared"
        return read_join_file(self._join_file)

    def _fail(self, error: BaseException) -> None:
        """Keep the first error for the training thread."""
        if self._error is None and not self._crew.stopping.is_set():
            self._error = error
            log.error("this rank stops: %s", error)

    plan: FragmentPlan
    config: RunConfig
    device: ReplicatedDevice
    learner_id: str
    run: str
    incarnation: int
    is_late: bool
    slot: int
    data_seed: int
    own_run_dir = None
    _join_file: Path | None
