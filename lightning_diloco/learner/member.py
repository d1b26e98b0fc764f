"""The link of a learner with one rank: joins the run, reports steps, drains and leaves.

With several ranks, rank 0 uses a subclass that also leads the other ranks (`ranks/leader.py`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from lightning_diloco import errors
from lightning_diloco.config import LearnerConfig
from lightning_diloco.errors import DiLoCoError
from lightning_diloco.learner.control_channel import TICK_S
from lightning_diloco.learner.driver import Driver
from lightning_diloco.learner.join import Joining, MakeDevice
from lightning_diloco.learner.lease_client import LeaseClient
from lightning_diloco.learner.link import AskedToLeave, never
from lightning_diloco.learner.name import own_name
from lightning_diloco.learner.shards import ShardedConnection
from lightning_diloco.learner.whereabouts import Whereabouts, given_run_dir
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.process.retry import retry
from lightning_diloco.protocol import events, limits, messages
from lightning_diloco.protocol.data_ranges import Catalogue, Piece
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Connection
from lightning_diloco.transport.flight import FlightConnection
from lightning_diloco.transport.portions import LargeConnection

log = logging.getLogger(__name__)

LEAVE_S = 10.0
FINAL_ANCHOR_S = 60.0  # per fragment: several attempts on a bad network, because the final anchor is the run's result
REPORT_S = 10.0
GOODBYE_S = 2.0


class Member(Driver):
    """The link of a learner with one rank.

    Args:
        run_options: explicit `RunConfig` options.
        learner: this learner's own options.
        root_dir: folder for the run directory of an embedded syncer; None: the run directory is temporary, and removed
            when the run has finished.
        connect: makes the connection to the syncer.
    """

    _has_ranks = False

    def __init__(
        self,
        run_options: dict[str, Any],
        learner: LearnerConfig,
        root_dir: Path | None,
        *,
        connect: Callable[[JoinAddress], Connection] = FlightConnection,
    ) -> None:
        super().__init__()
        self._run_options, self._learner, self._connect = run_options, learner, connect
        self._whereabouts = Whereabouts(learner, root_dir, self._crew)
        self._connection: LargeConnection | None = None
        self._desk: LeaseClient | None = None
        self._has_verdict = False

    # ------------------------------------------------------------------------------------------------------- the start

    def start(self, model: ModelDescription, make_device: MakeDevice) -> None:
        """See `Link.start`."""
        address = self._whereabouts.find(lambda: self._left is None)
        self._connection = self._connected(address)
        self.learner_id = self._learner.learner or os.environ.get("DILOCO_LEARNER") or own_name(address.run)
        joined = Joining(
            self._connection,
            address,
            session=self._session,
            learner=self.learner_id,
            options=self._run_options,
            model=model,
            make_device=make_device,
            run_dir=given_run_dir(),
        ).run()
        log.info("learner %s takes part in %s as incarnation %d", self.learner_id, address, joined.welcome.incarnation)
        self.plan, self.config, self.device = joined.plan, joined.config, joined.device
        self.run, self.incarnation, self.slot = joined.welcome.run, joined.welcome.incarnation, joined.welcome.slot
        self.data_seed = int(joined.welcome.manifest.get("data_seed", 0))
        self.run_steps = joined.run_steps
        self.is_late = self.run_steps > 0
        self.differing = joined.differing
        unit = joined.welcome.manifest["token_unit"]
        self._unit = None if unit is None else str(unit)
        machine = joined.machine(self.learner_id, self._learner, has_ranks=self._has_ranks)
        num_lanes = 1 if self._has_ranks else 1 + len(self._sharded.shards)  # ranks upload one contribution at a time
        self._drive(machine, self._connection, cursor=joined.cursor, active=joined.active, num_lanes=num_lanes)

    def _connected(self, address: JoinAddress) -> LargeConnection:
        self._sharded = ShardedConnection(self._connect, address, self._whereabouts.join_file)
        return self._sharded

    @property
    def own_run_dir(self) -> Path | None:
        """See `Link.own_run_dir`."""
        return self._whereabouts.own_run_dir

    def lease(self, catalogue: Catalogue) -> LeaseClient:
        """See `Link.lease`."""
        self._desk = LeaseClient(
            self._machine.lessee,
            self._changed,
            catalogue,
            self._raise_error,
            ask=self._tick,
            is_online=lambda: self._line.is_online,
            waited=self.held_up,
        )
        return self._desk

    # -------------------------------------------------------------------------------------------------------- training

    @property
    def fleet_tokens(self) -> int:
        """See `Link.fleet_tokens`."""
        return self._machine.fleet_tokens

    @property
    def stopped(self) -> str | None:
        """See `Link.stopped`."""
        return self._machine.stopped

    def _end_step(self, tokens: int) -> int:
        state, watch = self._machine, self._watch
        state.step_s, state.long_step_s, state.tokens_per_s = watch.step_s, watch.long_step_s, watch.tokens_per_s
        state.metrics = self._reported()
        return self._handle(events.StepDone(state.step + 1, self._tokens, self._collected(tokens)))

    def _collected(self, tokens: int) -> tuple[Piece, ...]:
        """Return the leased data of a step with this number of tokens; empty if no data are leased."""
        return self._desk.collect() if self._desk else ()

    # --------------------------------------------------------------------------------------------------------- the end

    def finish(
        self, reason: messages.Reason = "finished", within_s: float | None = None, asked: AskedToLeave = never
    ) -> bool:
        """See `Link.finish`."""
        self._raise_error()
        self._watch.interrupted()
        with self._changed:
            self._machine.metrics = self._reported()
        self._handle(events.Finish(reason, within_s=within_s))
        self._wait_for_leave(LEAVE_S if within_s is None else GOODBYE_S, asked)
        self._raise_error()
        if self._left is None:
            log.info("the syncer did not confirm in time that this learner left; its unmerged tokens count as lapsed")
        has_finished = reason == "finished" and not self.is_preempted
        is_last = has_finished and self._left is not None and self._left.is_last
        if is_last and self.is_drained:
            self._take_final()
            self._raise_error()
        return is_last

    def _wait_for_leave(self, grace_s: float, asked: AskedToLeave = never) -> None:
        """Make boundaries without steps until the learner has left, or until the drain time and `grace_s` are over.

        The training thread does this itself, because updates land and snapshots are taken only on this thread.
        """
        failed_before, was_online = self._error, True
        while self._left is None and self._error is failed_before:
            if not self.is_preempted and (left_s := asked()) is not None:
                within_s = max(0.0, min(left_s - GOODBYE_S, self._machine.drain_until_s - time.monotonic()))
                self.is_preempted, grace_s = True, GOODBYE_S
                log.warning("SIGTERM: the last contributions have %.0f s to be merged", within_s)
                self._handle(events.Finish("preempted", within_s=within_s))
            wait_s = self._machine.drain_until_s + grace_s - time.monotonic()
            if wait_s <= 0.0:
                break
            with self._boundary():
                is_online = self._line.is_online
                self._handle(events.Pause(is_online))
                if was_online and not is_online and wait_s > grace_s:
                    log.warning("the last contributions wait for the syncer to return; Ctrl-C leaves without them")
                was_online = is_online
                if self._left is None and self._error is failed_before:
                    self._changed.wait(TICK_S)

    def _boundary(self) -> AbstractContextManager[Any]:
        """Return a context that holds the lock for one boundary after the last step."""
        return self._changed

    @property
    def is_drained(self) -> bool:
        """See `Link.is_drained`."""
        with self._changed:
            return not any(self._machine.progress.pending)

    def _take_final(self) -> None:
        """Fetch the newest anchors. They are final, because no other learner takes part."""
        try:
            for p, f in enumerate(self._machine.fragments):
                final = retry(partial(self._freight.take_final, p, f.generation, f.landed), within_s=FINAL_ANCHOR_S)
                with self._changed:
                    f.ended_at(*final)
        except DiLoCoError as error:
            log.warning("the final anchor could not be fetched, the one before it is kept: %s", error)

    def report(self, eval_loss: float | None, reason: str | None = None, *, within_s: float = REPORT_S) -> None:
        """See `Link.report`."""
        self._has_verdict = True
        shown = None if reason is None else reason[: limits.MAX_CHARS]  # it may name all metrics of a validation
        self._line.say_now(messages.Evaluated(eval_loss, shown), within_s=within_s)

    def _say_goodbye(self) -> None:
        if self._state is None:
            return
        if self._left is None and self._line.is_online and not isinstance(self._error, errors.FencedError):
            self._handle(events.Finish("failed", drain=False))
            self._wait_for_leave(GOODBYE_S)
        self._line.hurry()
        if self._left is not None and self._left.is_last and not self._has_verdict:
            self.report(None, "the last learner ended without validating the anchor", within_s=GOODBYE_S)

    def _stop(self) -> None:
        if self._state is not None:
            self._freight.stop()
        if self._connection is not None:
            self._connection.close()

    def _let_go(self, *, threads_have_ended: bool) -> None:
        is_joined, is_last = self._state is not None, self._left is not None and self._left.is_last
        self._whereabouts.let_go(was_joined=is_joined, is_last=is_last, is_drained=is_joined and self.is_drained)
