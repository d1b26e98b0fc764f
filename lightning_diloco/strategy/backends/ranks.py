"""Hooks of a learner with several processes; `launchers.py` starts and ends the processes.

1. Each rank has a link. Rank 0 communicates with the syncer, and the other ranks follow rank 0.
2. When the last batch of an inner step is known, each rank sends its tokens and its requests, such as to stop after
   this step. Rank 0 also sends the fleet's tokens. These numbers travel while the step computes. When the step ends,
   all ranks know the sums over the ranks (`learner/ranks/agreement.py`).
3. Training data is split over ranks by the same rule as over learners, so that ranks of all learners read different
   samples, whatever the layout of a learner. For leased data, rank 0 leases and reads for all ranks
   (`strategy/data/rank_batches.py`).
4. All ranks of a learner have the same id and the same folder. A launcher passes the id on to the ranks that it starts.
   If the ranks are started in another way (torchrun, SLURM), DILOCO_LEARNER gives them the id.
5. All ranks write and read checkpoints together (`strategy/recovery/rank_checkpointer.py`). They also handle SIGTERM
   together: when a step ends, all ranks know whether a rank has received the signal, and all of them leave there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from torch.optim import Optimizer
from typing_extensions import override

from lightning_diloco.devices.part import PartFragments
from lightning_diloco.errors import ConfigError
from lightning_diloco.learner.name import given_address
from lightning_diloco.storage.checkpoint_store import CheckpointStore
from lightning_diloco.strategy.backends import can_be_ranks
from lightning_diloco.strategy.backends.launchers import Processes, Scripts
from lightning_diloco.strategy.data.hooks import wants_link
from lightning_diloco.strategy.data.range_batches import Batches, RangeBatches, Ranges
from lightning_diloco.strategy.hooks import DiLoCoHooks
from lightning_diloco.strategy.recovery import optimizer_state
from lightning_diloco.strategy.recovery.checkpointer import LearnerCheckpointer, Owner
from lightning_diloco.strategy.recovery.rank_checkpointer import RanksCheckpointer, layout_of
from lightning_diloco.strategy.trainer.stopping import StoppingTogether

if TYPE_CHECKING:
    from lightning_diloco.learner.link import Link
    from lightning_diloco.learner.ranks.group import Ranks
    from lightning_diloco.learner.ranks.memory import Footprint
    from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice
    from lightning_diloco.transport.address import JoinAddress

log = logging.getLogger(__name__)


class RanksHooks(DiLoCoHooks):
    """Mixin: put it before one of Lightning's strategies with several processes."""

    _together: StoppingTogether | None = None
    _ranks_ahead: Ranks | None = None  # set from the first request to the syncer until the link owns it

    # --- start ---------------------------------------------------------------------------------------------------

    _inner: type[Strategy]

    def _check_devices(self, devices: Sequence[torch.device], num_nodes: int) -> None:
        types, name = sorted({device.type for device in devices}), self._inner.__name__
        if len(types) != 1 or not can_be_ranks(types[0]):
            raise ConfigError(
                f"inner={name}() on devices of type {'/'.join(types)}: it trains on cpu, or on an accelerator that "
                'torch has a module for, such as cuda; pass Trainer(accelerator="gpu") where there is a CUDA GPU, else '
                'pass Trainer(accelerator="cpu")'
            )
        if getattr(self, "_process_group_backend", None) == "nccl" and types == ["cpu"]:
            raise ConfigError(
                "inner with process_group_backend='nccl' on devices of type cpu: nccl needs cuda; leave it out, or "
                "pass process_group_backend='gloo'"
            )

    def _own_launcher(self) -> _Launcher:
        if self.root_device.type == "tpu":
            from lightning_diloco.strategy.backends.torch_tpu import ChipScripts

            return ChipScripts(self)
        if isinstance(self._launcher, _MultiProcessingLauncher):
            return Processes(self, self._launcher._start_method)
        return Scripts(self)

    @override
    def _get_process_group_backend(self) -> str:
        """Return the user's backend or that of the device; Lightning knows those of CPUs and CUDA only."""
        given: str | None = self._process_group_backend
        return given or dist.get_default_backend_for_device(self.root_device)

    def _separate_paths(self, trainer: pl.Trainer) -> None:
        is_named = self._learner.learner or os.environ.get("DILOCO_LEARNER")
        if given_address(self._learner) is not None and not is_named and self._is_started_by_others:
            raise ConfigError(
                f"{self.world_size} processes, started by {type(self.cluster_environment).__name__}, join a run as one "
                "learner without a name: all of them must know the same; set DILOCO_LEARNER for all, or learner="
            )
        super()._separate_paths(trainer)

    @property
    def _is_started_by_others(self) -> bool:
        assert self.cluster_environment is not None
        return self.cluster_environment.creates_processes_externally and self.world_size > 1

    def _ask_parts(self) -> None:
        """See `DataHooks._ask_parts`. Compare the settings of all ranks first, before a rank waits for a syncer."""
        if wants_link(self._trainer) and self._ranks_ahead is None:
            self._ranks_ahead = self._alike()
        super()._ask_parts()

    def _alike(self) -> Ranks:
        """Return this learner's ranks.

        Raises:
            ConfigError: their settings differ.
        """
        from lightning_diloco.learner.ranks.group import Ranks

        ranks = Ranks()
        ranks.compare(self._settings())
        return ranks

    def _close(self) -> None:
        super()._close()
        ahead, self._ranks_ahead = self._ranks_ahead, None
        if ahead is not None:
            ahead.close()

    def _make_link(self) -> Link:
        from lightning_diloco.learner.ranks.follower import Follower
        from lightning_diloco.learner.ranks.leader import Leader

        ranks, self._ranks_ahead = self._ranks_ahead or self._alike(), None
        self._heed_sigterm_together()
        own_boxes = self._part_boxes()
        boxes = [] if own_boxes is None else ranks.share(own_boxes)
        self._ranks, self._layout = ranks, layout_of(ranks.size, boxes or None)
        self._shares = ranks.share(super().distributed_sampler_kwargs["rank"])
        together: dict[str, Any] = {"ranks": ranks, "boxes": boxes, "kind": self._kind_of_device()}
        role = Leader if ranks.rank == 0 else Follower
        return role(self._run_options, self._learner, self._run_root, **together)

    def _kind_of_device(self) -> type[ReplicatedDevice]:
        """Return the class that lets the devices of all ranks work together."""
        from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice

        return ReplicatedDevice

    def _settings(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks, by name."""
        own = {name: value for name, value in asdict(self._learner).items() if name not in ("join", "learner")}
        own |= {"token_count_fn": self._token_count_fn is not None, "join": _told_apart(given_address(self._learner))}
        of_trainer = ("precision", "max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val")
        return {**self._run_options, **own, **{name: getattr(self._trainer, name) for name in of_trainer}}

    def _join(self) -> None:
        super()._join()
        self._together = StoppingTogether(self._trainer, self._ranks)
        if (found := self._footprint()) is None:
            return
        log.info("rank %d of %d: %s", self._ranks.rank, self._ranks.size, found)
        self._present.link.rank_bytes = max(self._ranks.share(found.peak))

    def _footprint(self) -> Footprint | None:
        """Return what the exchange takes of this rank's memory; None if the device reports it itself."""
        from lightning_diloco.learner.ranks.memory import footprint

        part = self._present.device.part if isinstance(self._present.device, PartFragments) else None
        where: dict[str, Any] = {"rank": self._ranks.rank, "size": self._ranks.size, "part": part}
        return footprint(self._present.link.plan, self._present.link.config, self._learner, **where)

    def _make_checkpointer(self, owner: Owner, url: str | None) -> LearnerCheckpointer:
        url = self._ranks.share(url)[0]  # only rank 0 knows whether this learner began the run
        store, every_steps = None if url is None else CheckpointStore(url), self._learner.checkpoint_every
        options: dict[str, Any] = {"every_steps": every_steps, "ranks": self._ranks, "layout": self._layout}
        return RanksCheckpointer(self._trainer, owner, store, **options)

    def held_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """See `DiLoCoHooks.held_optimizer_state`. It is the part of the state that this rank holds."""
        return self._present.copies.relative(optimizer, optimizer_state.held(optimizer))

    def give_optimizer_states(self, state: Mapping[str, Any]) -> None:
        """See `DiLoCoHooks.give_optimizer_states`."""
        for optimizer, held in zip(self.optimizers, state["optimizer_states"], strict=True):
            optimizer_state.give(optimizer, held, self.root_device)
            self._present.copies.restore(optimizer, held)

    def _part_boxes(self) -> dict[str, Any] | None:
        """Return this rank's box of each parameter by name; None if it holds whole parameters."""
        return None

    # --- data ----------------------------------------------------------------------------------------------------

    @property
    def data_part(self) -> tuple[int, int] | None:
        """(part, parts) of the training data that this rank reads; None: Lightning splits it over the ranks."""
        if (of_learner := super().data_part) is None:
            return None
        (part, parts), within = of_learner, super().distributed_sampler_kwargs
        return part + parts * within["rank"], parts * within["num_replicas"]

    def barrier(self, name: str | None = None) -> None:
        """See `DiLoCoHooks.barrier`. Also prevent Lightning from splitting training data that is split here."""
        super().barrier(name)
        if self._splits_here:
            self._use_distributed_sampler = self._connector.use_distributed_sampler
            self._connector.use_distributed_sampler = False
        elif hasattr(self, "_use_distributed_sampler"):
            self._connector.use_distributed_sampler = self.__dict__.pop("_use_distributed_sampler")

    def process_dataloader(self, dataloader: object) -> object:
        """See `DataHooks.process_dataloader`."""
        if not self._splits_here:
            return super().process_dataloader(dataloader)
        self._connector.use_distributed_sampler = self._use_distributed_sampler
        try:
            return super().process_dataloader(dataloader)
        finally:
            self._connector.use_distributed_sampler = False

    def _leased_batches(self, ranges: Ranges, batch_size: int) -> Batches:
        """See `DataHooks._leased_batches`."""
        from lightning_diloco.strategy.data.rank_batches import RankBatches

        handout, of_all = self._ranks.hand_out(self._shares), None
        if self._ranks.rank == 0:
            desk, size = self._present.link.lease(ranges.catalogue), batch_size * self._num_readers
            of_all = RangeBatches(ranges, desk, batch_size=size, seed=self._own_seed)
        return RankBatches(of_all, handout)

    @property
    def _num_readers(self) -> int:
        return len(set(self._shares))

    @property
    def _may_change_data(self) -> bool:
        """See `DataHooks._may_change_data`. This is the user's value, also while `barrier` overrides it."""
        return bool(getattr(self, "_use_distributed_sampler", super()._may_change_data))

    @property
    def _splits_here(self) -> bool:
        return self._preparing_train_loader and self.data_part is not None

    @property
    def _connector(self) -> Any:
        return self._trainer._accelerator_connector

    # --- training ------------------------------------------------------------------------------------------------

    def _begin_inner_step(self) -> None:
        if self._exchanging:
            fit = self._present
            tokens, _ = fit.counter.take()
            fit.link.begin_step(
                tokens if self._counts_tokens else 0,
                is_asked=fit.preemption.is_noticed,
                saves=fit.checkpointer.is_due_after(1),
                stops=self._wants_to_stop,
            )

    def _skip_inner_step(self) -> None:
        if self._exchanging:
            self._present.link.skip_step()

    @property
    def _wants_to_stop(self) -> bool:
        """Whether this rank wants to stop after this step; only rank 0 knows whether the run stops."""
        assert self._together is not None
        if self._together.is_put_off:
            return True
        return self.is_global_zero and self._present.stopping.verdict(self._present.link) is not None

    @property
    def fleet_tokens(self) -> int:
        """See `DiLoCoHooks.fleet_tokens`. All ranks have the same value, that of the beginning of the last step."""
        return self._joined.link.agreed.fleet_tokens if self._joined is not None else 0

    @property
    def _counts_tokens(self) -> bool:
        """Whether this rank counts its tokens; False if another rank counts the same samples."""
        return True

    def _end_inner_step(self, output: Any = None) -> None:
        super()._end_inner_step(output)
        if not self._exchanging:
            return
        fit, agreed = self._present, self._present.link.agreed
        assert isinstance(fit.checkpointer, RanksCheckpointer)
        fit.checkpointer.is_agreed = agreed.saves
        if agreed.stops:
            assert self._together is not None
            self._together.is_agreed = True
            fit.stopping.stop("a rank of this learner stops")
        if agreed.num_asked:
            self._sigterm_came()
            self._trainer._signal_connector.received_sigterm = True

    # --- the end --------------------------------------------------------------------------------------------------

    def on_validation_end(self) -> None:
        """See `DiLoCoHooks.on_validation_end`. If a rank stops because of the anchor, all ranks stop."""
        if self._together is not None and self._exchanging and not self._trainer.sanity_checking:
            self._together.agree_now()
        super().on_validation_end()

    def _let_go(self) -> None:
        if self._together is not None:
            self._together.close()
            self._together = None
        super()._let_go()

    # --- SIGTERM -------------------------------------------------------------------------------------------------

    def _heed_sigterm_together(self) -> None:
        """Replace Lightning's handler of SIGTERM by ours, which notes the signal.

        In Lightning's handler, the ranks would wait for each other during a computation, and hang.
        """
        handlers = signal.getsignal(signal.SIGTERM)
        if isinstance(handlers, _HandlersCompose):
            theirs = self._trainer._signal_connector._sigterm_notifier_fn
            handlers.signal_handlers = [self._pass_on if it == theirs else it for it in handlers.signal_handlers]

    def _pass_on(self, signum: int, _: FrameType | None) -> None:
        self._sigterm_came()
        assert self._launcher is not None
        self._launcher.kill(signum)

    @property
    def _exit_code(self) -> int:
        """See `DiLoCoHooks._exit_code`.

        It is 0 on ranks that `Scripts` has started, because their launcher kills all ranks if one ends with a nonzero
        code.
        """
        is_watched = isinstance(self.cluster_environment, LightningEnvironment) and self.local_rank > 0
        return 0 if is_watched and isinstance(self._launcher, Scripts) else super()._exit_code


def _told_apart(address: JoinAddress | None) -> str | None:
    """Return a digest in place of a join string, which is secret; equal join strings have equal digests."""
    return address and f"(SHA-256 {hashlib.sha256(address.join_string().encode()).hexdigest()[:12]})"
