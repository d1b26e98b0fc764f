"""The link of rank 0 of several ranks: it runs the protocol, and tells the other ranks what to do.

1. Rank 0 promises the landings and snapshots of a boundary when the step begins, and all ranks make them when the step
   ends. Ranks wait for each other before and after training, but not within a step.
2. Each rank uploads its own part of a contribution (`partial_uploads.py`).
3. While a rank does not answer, rank 0 sends nothing to the syncer. The learner then lapses like a learner that is
   gone, and returns when that rank answers again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.errors import RunOverError
from lightning_diloco.learner.control_channel import TICK_S
from lightning_diloco.learner.join import MakeDevice
from lightning_diloco.learner.link import AskedToLeave, never
from lightning_diloco.learner.member import Member
from lightning_diloco.learner.ranks.agreement import Agreement
from lightning_diloco.learner.ranks.one_of_several import OneOfSeveral
from lightning_diloco.learner.ranks.partial_uploads import PartedConnection
from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.protocol import actions, events, messages
from lightning_diloco.protocol.data_ranges import Piece, divided
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.portions import LargeConnection

SILENT_S = 5.0
KNOWN = ("learner_id", "run", "incarnation", "slot", "data_seed", "is_late")  # attributes of all ranks


class Leader(OneOfSeveral, Member):
    """The link of rank 0. Its `device` coordinates the devices of all ranks."""

    _has_ranks = True
    device: ReplicatedDevice
    _promise = actions.Promise((), ())
    _ends_together = False

    # --- joining -------------------------------------------------------------------------------------------------

    def start(self, model: ModelDescription, make_device: MakeDevice) -> None:
        """See `Link.start`."""
        with self._telling_failure():
            super().start(model, partial(self._make_devices, make_device))
        self.agreed = Agreement(fleet_tokens=self.fleet_tokens)
        self._go()
        self._crew.start("pulse", partial(self._ranks.pulse, self._crew))

    def _connected(self, address: JoinAddress) -> LargeConnection:
        super()._connected(address)
        self._parted = PartedConnection(self._sharded, self._ranks.uploads)
        return self._parted

    def _make_devices(self, make_device: MakeDevice, plan: FragmentPlan, config: RunConfig) -> ReplicatedDevice:
        """Make the device of rank 0, and have the other ranks make theirs for the same plan."""
        self._ranks.tell(
            {
                "do": "plan",
                "config": config.to_dict(),
                "shapes": {name: list(shape) for name, shape in plan.shapes.items()},
                "mean_names": sorted(plan.mean_names),
            }
        )
        device = self._in_front(make_device(plan, config), plan=plan, config=config)
        self._parted.prepare(plan, config, device.dealt)
        return device

    @contextmanager
    def _telling_failure(self) -> Iterator[None]:
        """Return a context in which a failure of rank 0 makes the other ranks fail, too."""
        try:
            yield
        except BaseException as error:
            self._ranks.tell({"do": "fail", "why": str(error), "is_over": isinstance(error, RunOverError)})
            self._is_over = True
            raise

    def _go(self) -> None:
        """Ask the other ranks whether they can reach the syncer, and let them begin to train."""
        join_file = self._whereabouts.join_file
        run_dir = None if join_file is None else str(join_file.parent)
        order = {"do": "reach", "run_dir": run_dir, "syncer": self._sharded.moved_to}
        found = self._ranks.collect(order, [1] * (self._ranks.size - 1))
        self.device.deals = self._parted.is_possible([bool(reaches) for reaches in found])
        known = {name: getattr(self, name) for name in (*KNOWN, "fleet_tokens")}
        self._ranks.tell({"do": "go", "known": known, "deals": self.device.deals})

    # --- training ------------------------------------------------------------------------------------------------

    def _begin(self, **said: Any) -> None:
        """See `Link._begin`. Also sends the promise for the next boundary."""
        with self._changed:
            self._promise = actions.Promise((), ())
            self._handle(events.StepBegins())
        promised = {"land": self._promise.land, "snapshot": self._promise.snapshot}
        super()._begin(**{"fleet_tokens": self.fleet_tokens, **promised, **said})

    def _end_step(self, tokens: int) -> int:
        """See `Link._end_step`. Makes the promised landings and snapshots before the machine asks for them."""
        self.device.make(self.agreed.land, self.agreed.snapshot)
        return super()._end_step(tokens)

    def _collected(self, tokens: int) -> tuple[Piece, ...]:
        """See `Member._collected`. Divides the step's tokens among the pieces.

        Rank 0 knows the samples of all ranks. It knows only its own tokens until the step ends.
        """
        return divided(super()._collected(tokens), tokens)

    def _do(self, action: actions.LearnerAction) -> int:
        if isinstance(action, actions.Promise):
            self._promise = action
        return super()._do(action)

    def _expect(self, p: int, values: Tensor) -> None:
        self.device.expect(p, values)

    def _anchor(self, p: int) -> Tensor | None:
        return self.device.counted_anchor(p)

    # --- a rank that is silent -----------------------------------------------------------------------------------

    def _hear(self, message: messages.FromSyncer) -> None:
        """Process a message, but only while all ranks answer, because the machine replies to most messages."""
        while self._is_silent and not self._crew.stopping.wait(TICK_S):
            pass
        super()._hear(message)

    def _tick(self) -> None:
        if not self._is_silent:
            super()._tick()

    @property
    def _is_silent(self) -> bool:
        return self._ranks.silent_s >= SILENT_S

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(
        self, reason: messages.Reason = "finished", within_s: float | None = None, asked: AskedToLeave = never
    ) -> bool:
        """See `Link.finish`. All ranks make boundaries until the learner has left."""
        self._ends_together = True
        try:
            is_last = super().finish(reason, within_s, asked)
        except BaseException:
            self._begin(is_over=True, num_failed=1)
            self._ranks.end()  # the other ranks know of the failure now
            raise
        finally:
            self._ends_together = False
        landed = tuple(self.device.landed) if is_last else ()
        ends = {"is_last": is_last, "is_drained": self.is_drained, "num_asked": int(self.is_preempted)}
        self._begin(is_over=True, land=landed, snapshot=(), **ends)
        self.is_preempted = self._agree().num_asked > 0
        self._ranks.tell({"do": "end"})
        self._parted.end()
        self._is_over = True
        return is_last

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        if self._ends_together:
            self._begin()
            self._agree()
        with self._changed:
            if self._ends_together:
                self.device.make(self.agreed.land, self.agreed.snapshot)
            yield
