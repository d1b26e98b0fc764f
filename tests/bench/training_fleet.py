"""A fleet in one process that trains real models, with the simulator's state machines and clock.

1. The state machines of a real run decide who snapshots, merges and lands which fragment, and when.
2. The code of a real run snapshots, encodes, merges, publishes and lands the tensors.
3. Only time and the network are simulated: a fragment lands `overlap` steps after its snapshot. Equal arguments give
   equal losses.
4. Participation can be forced: announcements then reach only learners of the group that opened the round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.buffers import tensor_of
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.merge import MergeReport
from lightning_diloco.core.quantize import scaled
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages
from lightning_diloco.simulate.fleet import Fleet, Network, Pace, SimulatedLearner
from lightning_diloco.simulate.syncer import SimulatedSyncer
from lightning_diloco.strategy.trainer.parameters import describe, trainable_parameters
from lightning_diloco.syncer.anchors import AnchorStore
from lightning_diloco.syncer.judging import Judge, Judgement
from lightning_diloco.syncer.norm_guard import NormGuard


@dataclass(slots=True)
class _Crew:
    """The state of one learner's process."""

    trainee: Trains
    batches: Iterator[Any]
    device: CpuFragments
    sent: dict[tuple[int, int], Tensor]
    staged: dict[int, tuple[object, Tensor | None]]


class Trains(Protocol):
    """A model that is trained one step at a time."""

    module: nn.Module

    def step(self, batch: Any) -> int:
        """Make one inner step; return the tokens or samples of the batch."""

    def validation_loss(self) -> float:
        """Return the loss of the current parameters."""


class TrainingFleet(Fleet):
    """Learners that train, and a syncer that merges.

    Args:
        config: options of the run; `overlap` sets the delay of the simulated network.
        learner: options of all learners; only `align` is used.
        trainees: one model per learner, equal at the start.
        batches: one stream of batches per learner.
        paces: one pace per learner; `num_steps` ends it. If start times differ, no learner waits for the others.
        together: size of the groups that receive each other's rounds; None: all learners.
        latency_s: one-way latency of control messages; None for almost none.
        is_guarded: whether contributions are compared with each other.
    """

    syncer: TrainingSyncer

    def __init__(
        self,
        config: RunConfig,
        learner: LearnerConfig,
        trainees: Sequence[Trains],
        batches: Sequence[Iterator[Any]],
        paces: Sequence[Pace],
        *,
        together: int | None = None,
        latency_s: float | None = None,
        is_guarded: bool = True,
    ) -> None:
        model = describe(trainees[0].module, "tokens")
        self.plan = FragmentPlan.balanced(
            model.shapes,
            num_fragments=config.fragments_wanted,
            max_slice_numel=config.max_slice_numel,
            mean_names=model.mean_names,
        )
        assert self.plan.num_fragments == config.num_fragments, "the fragments asked for are not all there"
        self.store = AnchorStore(self.plan, config)
        self._is_guarded = is_guarded
        transfer_s = (config.overlap - 0.5) / 2 * paces[0].step_s
        super().__init__(
            config,
            network=Network(
                latency_s=0.01 * paces[0].step_s if latency_s is None else latency_s,
                upload_s=transfer_s,
                download_s=transfer_s,
            ),
            merge_s=0.01 * paces[0].step_s,
            expect=None if any(pace.starts_s for pace in paces) else len(trainees),
        )
        self._together = together or len(trainees)
        self._groups: dict[str, int] = {}
        self._openers: dict[int, int] = {}
        self._crews: dict[str, _Crew] = {}
        for trainee, stream, pace in zip(trainees, batches, paces, strict=True):
            device = CpuFragments(self.plan, trainable_parameters(trainee.module), config, learner)
            self._board(self.start(f"l{len(self._crews)}", pace), _Crew(trainee, stream, device, {}, {}))

    def anchor_loss(self, *, limit_s: float, num_sound: int | None = None) -> float:
        """Run to the end, and return the validation loss of the anchor.

        Args:
            limit_s: simulated time that this may take.
            num_sound: how many learners, from the first, must end without an error; None: all.
        """
        self.run_to_the_end(limit_s=limit_s)
        errors = [learner.error for learner in list(self.learners.values())[:num_sound] if learner.error]
        assert not errors, errors
        crew = next(iter(self._crews.values()))
        crew.device.show_anchor()
        return crew.trainee.validation_loss()

    @property
    def correlation(self) -> float:
        """Mean cosine of two successive outer gradients of a fragment; NaN before there are two."""
        cosines = self.syncer.cosines
        return statistics.fmean(cosines) if cosines else math.nan

    def _made_syncer(self, **options: Any) -> TrainingSyncer:
        return TrainingSyncer(
            self,
            self.config,
            self._timeline,
            self.random,
            store=self.store,
            sent=lambda c: self._crews[c.session].sent[c.ready.fragment, c.ready.seq],
            is_guarded=self._is_guarded,
            **options,
        )

    def _board(self, learner: SimulatedLearner, crew: _Crew) -> None:
        for p in range(self.plan.num_fragments):
            values = crew.device.local_values(p)
            if not self._crews:
                self.store.seed(p, values)
            crew.device.adopt(p, values)
        self._groups[learner.session] = len(self._crews) // self._together
        self._crews[learner.session] = crew

    # ------------------------------------------------------------------------------------------------------- learners

    def _adopt_all(self, learner: SimulatedLearner, welcome: messages.Welcome) -> None:
        super()._adopt_all(learner, welcome)
        for p in range(self.plan.num_fragments):
            self._crews[learner.session].device.adopt(p, self.store.anchor(p).published)

    def _step(self, learner: SimulatedLearner) -> None:
        crew = self._crews[learner.session]
        tokens = crew.trainee.step(next(crew.batches))
        assert tokens == learner.pace.tokens, f"a batch of {tokens} tokens at a pace of {learner.pace.tokens}"
        super()._step(learner)

    def _do_for_learner(self, learner: SimulatedLearner, action: do.LearnerAction) -> None:
        crew = self._crews[learner.session]
        match action:
            case do.Snapshot():
                snapshot = crew.device.snapshot(action.ready.fragment)
                payload = crew.device.encode(snapshot).payload
                crew.sent[action.ready.fragment, action.ready.seq] = self._sent(learner, action.ready.fragment, payload)
            case do.Land():
                staged, adopted = crew.staged.pop(action.fragment)
                if adopted is not None:
                    crew.device.adopt(action.fragment, adopted)
                else:
                    crew.device.land(action.fragment, staged)  # type: ignore[arg-type]
            case do.Forget():
                crew.sent.pop((action.fragment, action.seq), None)
        super()._do_for_learner(learner, action)

    def _fetch_begins(self, learner: SimulatedLearner, action: do.Fetch) -> None:
        crew, p = self._crews[learner.session], action.fragment
        update = self.store.update_for(p, None if action.adopt else action.have)
        fate = self.syncer.state.roster[learner.session].fates.get(p)
        is_mine = fate is not None and fate[:2] == (action.seq, "merged")
        sent = crew.sent[p, fate[0]] if fate is not None and is_mine else None
        if sent is not None and fate is not None and fate[4] < 1:
            about = {"wire": self.config.wire, "block_size": self.config.block_size}
            sent = scaled(sent, fate[4], numel=self.store.layouts[p].padded_numel, **about)
        full = tensor_of(update.payload, torch.float32) if update.kind == "full" else None
        num_updates = update.version - update.from_version
        chain = tensor_of(update.payload, torch.uint8).chunk(num_updates) if num_updates else ()
        staged = None if action.adopt else crew.device.stage(p, Update(full, chain, sent))
        crew.staged[p] = staged, full if action.adopt else None

    def _sent(self, learner: SimulatedLearner, p: int, payload: Tensor) -> Tensor:
        """Return the payload of a contribution that reaches the syncer."""
        return payload

    # ------------------------------------------------------------------------------------------------------- messages

    def _hears(self, session: str, announced: messages.Announce) -> bool:
        """Return whether a learner is in the group that opened the round, which is that of the last intent."""
        opener = self._openers.setdefault(announced.round, self._groups[self._speaker])
        return self._groups[session] == opener

    def _tell_syncer(self, learner: SimulatedLearner, event: on.SyncerEvent, boot: int) -> None:
        if isinstance(event, on.FromALearner) and isinstance(event.message, messages.Intent):
            self._speaker = event.session
        super()._tell_syncer(learner, event, boot)

    def deliver(self, session: str, message: messages.FromSyncer, boot: int) -> None:
        """See `World`."""
        if not isinstance(message, messages.Announce) or self._hears(session, message):
            super().deliver(session, message, boot)


class TrainingSyncer(SimulatedSyncer):
    """A syncer that merges tensors, as `syncer/merge_worker.py` does.

    Args:
        store: the anchors.
        sent: returns the payload of a contribution.
        is_guarded: whether contributions are compared with each other.

    Attributes:
        cosines: cosines of successive outer gradients of a fragment.
    """

    def __init__(
        self,
        *around: Any,
        store: AnchorStore,
        sent: Callable[[do.Contribution], Tensor],
        is_guarded: bool,
        **options: Any,
    ) -> None:
        super().__init__(*around, **options)
        self.cosines: list[float] = []
        self._store, self._sent, self._is_guarded = store, sent, is_guarded
        self._usual = NormGuard()
        self._judge = Judge(self._usual)
        self._last_gradients: dict[int, Tensor] = {}
        self._merges: dict[int, tuple[tuple[do.Contribution, ...], Tensor, MergeReport]] = {}

    def _merge(self, action: do.Merge) -> on.Merged:
        p, members = action.fragment, action.contributions
        payloads = [self._sent(c) for c in (*members, *action.on_trial)]
        measured = self._store.measure(p, payloads)
        judged = self._judge.judge(p, members, action.on_trial, measured) if self._is_guarded else Judgement((), {})
        if judged.refused.keys() & {c.session for c in members}:
            return on.Merged(p, action.round, verdicts=judged.refused)
        only, limits = payloads[: len(members)], judged.max_norms or None
        self._merges[p] = members, *self._store.merge(p, only, action.shares, limits, measured.only(len(members)))
        kept = {c.session: part for c, part in zip(members, self._merges[p][2].kept, strict=True)}
        return on.Merged(p, action.round, kept, judged.verdicts)

    def _commit(self, action: do.Apply, boot: int) -> None:
        members, gradient, found = self._merges.pop(action.fragment)
        self._store.commit(action.fragment, gradient, work=action.work)
        if (last := self._last_gradients.get(action.fragment)) is not None:
            self.cosines.append(float(cosine_similarity(last.float(), gradient.float(), dim=0)))
        self._last_gradients[action.fragment] = gradient
        learners, steps = [c.learner for c in members], [c.steps for c in members]
        self._usual.learn(action.fragment, learners, found.norms, steps, found.kept)
        super()._commit(action, boot)
