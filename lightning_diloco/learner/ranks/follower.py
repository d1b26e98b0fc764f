"""The link of a rank other than 0: it carries out rank 0's commands in parallel with training, and uploads its part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.config import LearnerConfig
from lightning_diloco.errors import DiLoCoError, JoinError, RunOverError
from lightning_diloco.learner.join import MakeDevice
from lightning_diloco.learner.link import AskedToLeave, never
from lightning_diloco.learner.name import given_address
from lightning_diloco.learner.ranks.agreement import Agreement
from lightning_diloco.learner.ranks.one_of_several import OneOfSeveral
from lightning_diloco.learner.ranks.partial_uploads import PartSender
from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice
from lightning_diloco.learner.shards import ShardedConnection
from lightning_diloco.manifest import ModelDescription, plan_of
from lightning_diloco.process.threads import Jobs, compute_alone, yield_cores
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.codec import Json
from lightning_diloco.transport.address import JoinAddress, read_join_file
from lightning_diloco.transport.base import Connection
from lightning_diloco.transport.flight import FlightConnection


class Follower(OneOfSeveral):
    """The link of a rank that is not 0.

    Args:
        run_options: not used; rank 0 sends the run's options.
        learner: this learner's own options, the same on all ranks.
        root_dir: not used.
        ranks, boxes, kind: see `OneOfSeveral`.
        connect: makes the connection to the syncer.
    """

    device: ReplicatedDevice

    def __init__(
        self,
        run_options: object,
        learner: LearnerConfig,
        root_dir: object,
        *,
        connect: Callable[[JoinAddress], Connection] = FlightConnection,
        **of_ranks: Any,
    ) -> None:
        super().__init__(**of_ranks)
        self._given = given_address(learner)  # None: rank 0 starts a syncer, whose run directory has it
        self._join_file: Path | None = None
        self._sender = PartSender(
            self._ranks.uploads, lambda address: ShardedConnection(connect, address, self._join_file)
        )
        self._copies: Jobs | None = None

    def start(self, model: ModelDescription, make_device: MakeDevice) -> None:
        """See `Link.start`. Carries out rank 0's commands until rank 0 has joined."""
        while self._follow(make_device) != "go":
            pass
        self._crew.start("follower", self._follow_on)
        self._crew.start("uploads", self._sender.run)
        self._copies = Jobs(self._crew, "copies", yields=False)
        self._crew.start("pulse", partial(self._ranks.pulse, self._crew))

    # ----------------------------------------------------------------------------------------------- training and end

    def _begin(self, *, saves: bool = False, **said: Any) -> None:
        """See `Link._begin`. Ignores `saves`, because rank 0 decides it."""
        super()._begin(**said)

    def _end_step(self, tokens: int) -> int:
        """See `Link._end_step`. Makes the landings and snapshots that all ranks make at this boundary."""
        assert self._copies is not None, "start() comes first"
        self.device.make(self.agreed.land, self.agreed.snapshot)
        if self.agreed.snapshot:
            self._copies.put(self.device.settle)
        self.num_landings += len(self.agreed.land)
        return 0

    def finish(
        self, reason: messages.Reason = "finished", within_s: float | None = None, asked: AskedToLeave = never
    ) -> bool:
        """See `Link.finish`. Makes boundaries, at which updates land, until rank 0 has left."""
        while not self._is_over:
            self._begin(num_asked=int(asked() is not None))
            self._agree()
            self._end_step(0)
            self._is_over = self.agreed.is_over
        self.is_preempted = self.agreed.num_asked > 0
        return self.agreed.is_last

    def _stop(self) -> None:
        if self._copies is not None:
            self._copies.stop()
        self._sender.close()

    # ---------------------------------------------------------------------------------------------- what rank 0 says

    def _follow_on(self) -> None:
        compute_alone()
        yield_cores()
        try:
            while self._follow() != "end":
                pass
        except RuntimeError as error:  # the group's connection to rank 0 has failed
            if not self._crew.stopping.is_set():
                raise DiLoCoError(f"rank 0 of this learner is gone ({error}); start the learner again") from error

    def _follow(self, make_device: MakeDevice | None = None) -> str:
        """Carry out the next command of rank 0; returns its name."""
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
        """Carry out a command; returns a call to make after the answer."""
        match command["do"]:
            case "plan":
                assert make_device is not None
                self.plan, self.config = plan, config = plan_of(command)
                self.device = self._in_front(make_device(plan, config), plan=plan, config=config, sender=self._sender)
            case "reach":
                reaches = self._sender.reach(partial(self._address, command["run_dir"]), command["syncer"])
                return partial(self._ranks.deliver, torch.tensor([float(reaches)]))
            case "go":
                self.device.deals = command["deals"]
                self.agreed = Agreement(fleet_tokens=command["known"].pop("fleet_tokens"))
                vars(self).update(command["known"])
            case "fail" | "end":
                pass
            case _:
                return self.device.follow(command, payload)
        return lambda: None

    def _address(self, run_dir: str | None) -> JoinAddress:
        """Return the syncer's address. All ranks were given it, or it is in a file that only this user can read."""
        self._join_file = None if run_dir is None else Path(run_dir) / "join"
        if self._given is not None:
            return self._given
        assert self._join_file is not None, "settings were compared"
        return read_join_file(self._join_file)
