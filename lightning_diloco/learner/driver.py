"""Drives the protocol machine of a learner: passes events to it from any thread, and carries out its actions.

1. On the training thread, the driver only takes snapshots and lands updates. It waits for the machine's lock, which
   other threads hold for microseconds.
2. `ControlChannel` transfers messages, and `FragmentExchange` transfers tensors. Their threads never change live
   parameters.
3. A network failure is not an error. The learner continues to train.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from functools import partial

from torch import Tensor

from lightning_diloco import errors
from lightning_diloco.core.digest import digest
from lightning_diloco.learner import status
from lightning_diloco.learner.control_channel import ControlChannel
from lightning_diloco.learner.exchange import FragmentExchange
from lightning_diloco.learner.join import placed
from lightning_diloco.learner.link import Link
from lightning_diloco.protocol import actions, events, messages
from lightning_diloco.protocol.learner.machine import LearnerState
from lightning_diloco.protocol.metric_names import LOSS
from lightning_diloco.transport.base import Connection

log = logging.getLogger(__name__)


class Driver(Link):
    """Base class of `Member`, which adds joining and leaving."""

    def __init__(self) -> None:
        super().__init__()
        self._state: LearnerState | None = None
        self._session = secrets.token_hex(16)  # nonce of this process
        self._left: actions.Left | None = None

    def _drive(
        self,
        machine: LearnerState,
        connection: Connection,
        *,
        cursor: int,
        active: messages.Active,
        num_lanes: int = 1,
    ) -> None:
        """Start the threads that transfer messages and tensors, and process the syncer's last message of the join.

        Args:
            machine: protocol machine of this learner.
            connection: connection to the syncer.
            cursor: cursor of the next poll.
            active: the syncer's last message of the join.
            num_lanes: see `FragmentExchange`.
        """
        self._state = machine
        with self._changed:  # the new threads handle no event before all attributes are set
            self._line = ControlChannel(
                connection,
                self._session,
                cursor,
                self._crew,
                hear=self._hear,
                reconnect=self._reconnect,
                tick=self._tick,
            )
            self._freight = FragmentExchange(
                connection,
                self._session,
                self.device,
                plan=self.plan,
                config=self.config,
                crew=self._crew,
                handle=self._handle,
                is_online=lambda: self._line.is_online,
                expect=self._expect,
                num_lanes=num_lanes,
            )
            self._handle(events.FromTheSyncer(active))

    @property
    def _machine(self) -> LearnerState:
        assert self._state is not None, "start() comes first"
        return self._state

    def _handle(self, event: events.LearnerEvent) -> int:
        """See `Link._handle`. Carries out the machine's actions."""
        with self._changed:
            num_exchanges = sum(map(self._do, self._machine.handle(event, time.monotonic())))
            self._changed.notify_all()
        return num_exchanges

    def _do(self, action: actions.LearnerAction) -> int:
        match action:
            case actions.Say():
                message = action.message
                self._line.say(placed(message) if isinstance(message, messages.Hello) else message)
            case actions.Snapshot():
                self._freight.encode(action.ready)
                return 1
            case actions.Upload():
                self._freight.upload(action.ready)
            case actions.Fetch():
                self._freight.fetch(action)
            case actions.Land():
                self._freight.land(action.fragment)
                self.num_landings += 1
                return 1
            case actions.Forget():
                self._freight.forget(action.fragment, action.seq)
            case actions.Warn():
                log.warning("%s", action.text)
            case actions.Fail():
                self._fail(getattr(errors, action.error)(action.text))
            case actions.SayHello():
                self._line.introduce()
            case actions.Left():
                self._left = action
                self._freight.forget_all()
                self._line.hurry()
        return 0

    # --- news of the run -----------------------------------------------------------------------------------------

    def _hear(self, message: messages.FromSyncer) -> None:
        self._handle(events.FromTheSyncer(message))

    def _tick(self) -> None:
        self._handle(events.Tick())

    def _expect(self, p: int, values: Tensor) -> None:
        """Announce to the other ranks, if there are any, that these values will be adopted at a boundary."""

    def _reconnect(self, number: int) -> None:
        """Send a hello again, with the marks of this learner's anchors."""
        known = tuple(self._mark(p) for p in range(self.plan.num_fragments))
        self._handle(events.Reconnected(number, known))

    def _mark(self, p: int) -> messages.Mark:
        """Return generation, version, digest and proof of a fragment's anchor.

        Training continues while the anchor is read from the device. If an update lands meanwhile, it is read again.
        """
        while True:
            before = self._landed(p)
            anchor_P = self._anchor(p)
            if anchor_P is not None and self._landed(p) == before:
                generation, version, proof = before
                return messages.Mark(generation, version, digest(anchor_P), proof)

    def _landed(self, p: int) -> tuple[int, int, str]:
        """Return generation, version and proof; consistent, because a landing holds the lock."""
        with self._changed:
            f = self._machine.fragments[p]
            return f.generation, f.held, f.proof

    def _anchor(self, p: int) -> Tensor | None:
        """Return the anchor; None if the ranks' parts of it have different versions at the moment."""
        return self.device.anchor(p)

    # --- metrics -------------------------------------------------------------------------------------------------

    def set_loss(self, read: Callable[[], float | None], *, aside: bool) -> None:
        """See `Link.set_loss`."""
        if aside:
            self._freight.aside(partial(self._set_late_loss, read))
        elif (loss := read()) is not None:
            self._losses[LOSS] = loss

    def _set_late_loss(self, read: Callable[[], float | None]) -> None:
        self.set_loss(read, aside=False)
        with self._changed:  # there may be no later step that reports it
            self._machine.metrics = {**self._machine.metrics, **self._losses}

    def metrics(self) -> dict[str, float]:
        """See `Link.metrics`."""
        with self._changed:
            return status.metrics(self._machine, self._watch, self._freight, self._line)

    def standing(self) -> status.LearnerStatus:
        """See `Link.standing`."""
        with self._changed:
            return status.standing(self._machine, self._line)
