"""Rank 0 of a learner with several ranks: it alone follows the protocol, and says what all of them do.

1. Whatever lands or is snapshotted was promised when the step began, and is done by all ranks when it ends.
2. Outside of steps, before training and after it, ranks wait for each other; within steps nobody waits.
3. While a rank does not answer, this learner is silent: it lapses like one that is gone, and returns with that rank.
4. Each rank uploads its own part of a contribution (`partial_uploads.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.errors import DiLoCoError, RunOverError
from lightning_diloco.learner.control_channel import TICK_S
from lightning_diloco.learner.join import MakeDevice
from lightning_diloco.learner.link import Link
from lightning_diloco.learner.ranks.agreement import Agreement
from lightning_diloco.learner.ranks.group import Ranks
from lightning_diloco.learner.ranks.partial_uploads import PartedConnection
from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.protocol import actions, events, messages
from lightning_diloco.protocol.data_ranges import Piece, divided
from lightning_diloco.transport.portions import LargeConnection

SILENT_S = 5.0
RANK_BYTES = "diloco/rank_bytes"
_NOTHING = actions.Promise((), ())


class LeaderLink(Link):
    """A learner's part in a run, for all its ranks; see `Link` for the other arguments.

    Args:
        ranks: of this learner, this being rank 0.
        boxes: what each rank holds of each parameter; empty: all of it.
        kind: how the ranks' devices work together.

    Attributes:
        rank_bytes: what exchanging takes of the rank that it takes most of; 0: not known.
    """

    agreed = Agreement()  # what all ranks know since the last step ended
    _has_ranks = True
    device: ReplicatedDevice
    rank_bytes = 0

    def __init__(
        self,
        *args: Any,
        ranks: Ranks,
        boxes: Sequence[Mapping[str, Any]] = (),
        kind: type[ReplicatedDevice] = ReplicatedDevice,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks
        self._kind = partial(kind, ranks=ranks, boxes=boxes, stopping=self._crew.stopping)
        self._promise = _NOTHING
        self._skipped_tokens = 0
        self._ends_together = False
        self._is_over = False
        connect = self._connect
        self._connect = lambda address: self._parted_connection(connect(address))

    def start(self, model: ModelDescription, make_device: MakeDevice) -> None:
        """See `Link.start`; the other ranks start, or fail, with this one."""
        try:
            super().start(model, partial(self._relayed, model, make_device))
        except BaseException as error:
            self._ranks.tell({"do": "fail", "why": str(error), "is_over": isinstance(error, RunOverError)})
            self._is_over = True
            raise
        self._parted.prepare(self.plan, self.config, self.device.dealt)
        self.device.deals = self._all_reach_the_syncer()
        self.agreed = Agreement(fleet_tokens=self.fleet_tokens)
        known = {"run": self.run, "incarnation": self.incarnation, "is_late": self.is_late, "deals": self.device.deals}
        known |= {"slot": self.slot, "data_seed": self.data_seed, "fleet_tokens": self.fleet_tokens}
        self._ranks.tell({"do": "go", "learner": self.learner_id, **known})
        self._crew.start("pulse", partial(self._ranks.pulse, self._crew))

    def _parted_connection(self, connection: LargeConnection) -> PartedConnection:
        self._parted = PartedConnection(connection, self._ranks.uploads)
        return self._parted

    def _all_reach_the_syncer(self) -> bool:
        own = None if self.join_file is None else str(self.join_file.parent)
        found = self._ranks.collect({"do": "reach", "run_dir": own}, [1] * (self._ranks.size - 1))
        return self._parted.is_possible([bool(reaches) for reaches in found])

    def _relayed(
        self, model: ModelDescription, make_device: MakeDevice, plan: FragmentPlan, config: RunConfig
    ) -> ReplicatedDevice:
        self._ranks.tell(
            {
                "do": "plan",
                "config": config.to_dict(),
                "shapes": {name: list(shape) for name, shape in plan.shapes.items()},
                "mean_names": sorted(plan.mean_names),
            }
        )
        return self._kind(make_device(plan, config), plan=plan, config=config)

    # -------------------------------------------------------------------------------------------------------- training

    def begin_step(self, tokens: int, *, is_asked: bool = False, saves: bool = False, stops: bool = False) -> None:
        """All batches of a step are known: tell the others what its end will bring."""
        entered_s = time.perf_counter()
        self._begin(tokens, num_asked=int(is_asked), saves=saves, stops=stops)
        self._watch.stall_s += time.perf_counter() - entered_s

    def step(self, tokens: int, unit: str) -> None:
        """See `Link.step`; `tokens` come on top of those that `begin_step` told of."""
        entered_s = time.perf_counter()
        agreed = self._agreed()
        self._watch.stall_s += time.perf_counter() - entered_s
        tokens, self._skipped_tokens = tokens + agreed.tokens + self._skipped_tokens, 0
        with self._changed:  # the machine and the anchors change together
            self._make(agreed)
            super().step(tokens, unit)

    def skip_step(self) -> None:
        """What began turned out to be no step; its tokens count in the next one."""
        self._skipped_tokens += self._agreed().tokens

    def finish(self, reason: messages.Reason = "finished", within_s: float | None = None) -> bool:
        """See `Link.finish`."""
        self._ends_together = True
        try:
            is_last = super().finish(reason, within_s)
        except BaseException:
            self._begin(is_over=True, num_failed=1)
            self._ranks.end()
            raise
        finally:
            self._ends_together = False
        said = {"is_last": is_last, "is_drained": self.is_drained}
        self._begin(is_over=True, land=tuple(self.device.landed) if is_last else (), snapshot=(), **said)
        self._agreed()
        self._ranks.tell({"do": "end"})
        self._parted.end()
        self._is_over = True
        return is_last

    def close(self) -> None:
        """See `Link.close`; the groups stay if this ended in any other way: a rank may never answer again."""
        super().close()
        if self._is_over and not self._crew.join(0.0):
            self._is_over = False
            self._ranks.close()

    def _wait_for_leave(self, within_s: float) -> None:
        """As ever, but what lands meanwhile lands everywhere."""
        if not self._ends_together:
            return super()._wait_for_leave(within_s)
        until_s = time.monotonic() + within_s
        while self._left is None and self._error is None and time.monotonic() < until_s:
            self._begin()
            agreed = self._agreed()
            with self._changed:
                self._make(agreed)
                self._handle(events.Pause())
                self._changed.wait(TICK_S)
        self.device.landed.clear()
        return None

    # --------------------------------------------------------------------------------------------------------- helpers

    def _begin(self, tokens: int = 0, **said: Any) -> None:
        with self._changed:
            self._promise = _NOTHING
            self._handle(events.StepBegins())
        promised = {"land": self._promise.land, "snapshot": self._promise.snapshot, "num_failed": int(self._has_failed)}
        agreement = Agreement(tokens=tokens, fleet_tokens=self.fleet_tokens, **{**promised, **said})
        self._ranks.begin(agreement.numbers(self.plan.num_fragments))

    def _agreed(self) -> Agreement:
        agreed = self.agreed = Agreement.of(self._ranks.end())
        self.device.landed.clear()
        if agreed.num_failed and not self._has_failed:
            raise DiLoCoError("another rank of this learner has stopped; its own output says why; start it again")
        return agreed

    def _make(self, agreed: Agreement) -> None:
        if not agreed.num_failed:
            self.device.make(agreed.land, agreed.snapshot)

    def _collected(self, tokens: int) -> tuple[Piece, ...]:
        """See `Link._collected`; rank 0 knows of all samples, and of its own tokens only until a step ends."""
        return divided(super()._collected(tokens), tokens)

    def _expect(self, p: int, values: Tensor) -> None:
        """See `Link._expect`."""
        self.device.expect(p, values)

    def _anchor(self, p: int) -> Tensor | None:
        """See `LearnerMetrics._anchor`."""
        return self.device.counted_anchor(p)

    def _reported(self) -> dict[str, float]:
        return {**super()._reported(), RANK_BYTES: float(self.rank_bytes)}

    @property
    def _has_failed(self) -> bool:
        return self._error is not None

    def _do(self, action: actions.LearnerAction) -> int:
        if isinstance(action, actions.Promise):
            self._promise = action
            return 0
        return super()._do(action)

    def _hear(self, message: messages.FromSyncer) -> None:
        """See `Link._hear`; while a rank is silent nothing is heard, because much of it would be answered."""
        while self._ranks.silent_s >= SILENT_S and not self._crew.stopping.wait(TICK_S):
            pass
        super()._hear(message)

    def _tick(self) -> None:
        if self._ranks.silent_s < SILENT_S:
            super()._tick()
