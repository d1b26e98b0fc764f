"""Another rank than 0 of a learner: no protocol; it does what rank 0 says beside training, and uploads its part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.errors import DiLoCoError, JoinError, RunOverError
from lightning_diloco.learner.join import MakeDevice
from lightning_diloco.learner.ranks.agreement import Agreement
from lightning_diloco.learner.ranks.group import Ranks
from lightning_diloco.learner.ranks.partial_uploads import PartSender
from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice
from lightning_diloco.learner.rotation import Followed
from lightning_diloco.manifest import plan_of
from lightning_diloco.process.threads import Crew, Jobs, compute_alone, yield_cores
from lightning_diloco.protocol.codec import Json
from lightning_diloco.transport.address import JoinAddress, read_join_file
from lightning_diloco.transport.base import Connection
from lightning_diloco.transport.portions import Portioned


class Follower:
    """What `Link` has at a rank that is not 0.

    Args:
        ranks: of this learner.
        in_front: makes the device that `follow`s, of the own one.
        crew: runs the threads.
        address: that all ranks were given; None: rank 0 starts a syncer, and it is in its run directory.
        connect: makes the connection.

    Attributes:
        is_over: whether rank 0 says nothing any more.
    """

    def __init__(
        self,
        ranks: Ranks,
        in_front: Callable[..., ReplicatedDevice],
        crew: Crew,
        address: JoinAddress | None,
        connect: Callable[[JoinAddress], Connection],
    ) -> None:
        self._ranks, self._crew, self._given = ranks, crew, address
        self._join_file: Path | None = None
        self._sender = PartSender(ranks.uploads, lambda address: Portioned(Followed(connect, address, self._join_file)))
        self._in_front = partial(in_front, sender=self._sender)
        self._known: dict[str, Any] = {}
        self._copies: Jobs | None = None
        self.is_over = False

    def join(self, make_device: MakeDevice) -> dict[str, Any]:
        """Do what rank 0 says until it has joined; returns what is known then.

        Raises:
            JoinError: it could not.
            RunOverError: it could not because the run has ended.
        """
        while self._follow(make_device) != "go":
            pass
        self._crew.start("follower", self._follow_on)
        self._crew.start("uploads", self._sender.run)
        self._copies = Jobs(self._crew, "copies", yields=False)
        return self._known

    def make(self, agreed: Agreement) -> None:
        """Training thread: what all ranks do at this boundary."""
        assert self._copies is not None, "join() comes first"
        self._device.make(agreed.land, agreed.snapshot)
        if agreed.snapshot:
            self._copies.put(self._device.settle)

    def close(self) -> None:
        """Have the threads end, and let go of the connection."""
        if self._copies is not None:
            self._copies.stop()
        self._sender.close()

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
            self.is_over = True
            if command["is_over"]:
                raise RunOverError(command["why"])
            raise JoinError(f"rank 0 of this learner could not join: {command['why']}")
        return str(command["do"])

    def _do(self, command: Json, payload: Tensor, make_device: MakeDevice | None) -> Callable[[], object]:
        """Returns what comes after the answer."""
        match command["do"]:
            case "plan":
                assert make_device is not None
                plan, config = plan_of(command)
                self._device = self._in_front(make_device(plan, config), plan=plan, config=config)
                self._known |= {"plan": plan, "config": config, "device": self._device}
            case "reach":
                reaches = self._sender.reach(partial(self._address, command["run_dir"]))
                return partial(self._ranks.deliver, torch.tensor([float(reaches)]))
            case "go":
                self._device.deals = command["deals"]
                self._known |= command["known"]
            case "fail" | "end":
                pass
            case _:
                return self._device.follow(command, payload)
        return lambda: None

    def _address(self, run_dir: str | None) -> JoinAddress:
        """Known here, as all ranks were given the same, or from a file that only this user can read."""
        self._join_file = None if run_dir is None else Path(run_dir) / "join"
        if self._given is not None:
            return self._given
        assert self._join_file is not None, "settings were compared"
        return read_join_file(self._join_file)
