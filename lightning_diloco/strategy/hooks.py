"""The strategy: what it overrides in each of Lightning's strategies; the parts of a fit (fit.py) do the work.

1. A fit begins at the Trainer's barrier "run-stage". By then Lightning has restored a checkpoint, moved the model to
   its device and made the optimizers; neither the sanity check nor a training loader has run. `validate`, `test`,
   `predict` and `fast_dev_run` begin no fit. Neither does a tuner's trial, which calls the fit loop directly.
2. inner_steps.py defines when an inner step ends, and when parameters are copied after it.
3. We change parameters only at the end of an inner step, around validation, and when the run is left. The run is left
   as soon as it is known that no step follows: before the last validation and the last checkpoints, and at the latest
   before the callbacks' `on_train_end` (trainer/last_step.py). After that, the module is an ordinary one.
4. The anchor is shown before all hooks of a validation, and the local parameters after all of them
   (trainer/outermost.py). The end of training comes before every callback's hook.
5. The launcher separates this learner's paths from other learners' before any process is started.
6. trainer/lightning_checkpoints.py says what Lightning's checkpoints hold. The hooks for training data are in
   data/hooks.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices import device_for
from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.storage.checkpoint_store import CheckpointStore
from lightning_diloco.strategy.data.hooks import DataHooks, wants_link
from lightning_diloco.strategy.data.token_counter import TokenCountFn
from lightning_diloco.strategy.fit import DiLoCoFit
from lightning_diloco.strategy.identity import check_first_fit, check_hosts, learner_id
from lightning_diloco.strategy.recovery.checkpointer import LearnerCheckpointer, Owner
from lightning_diloco.strategy.recovery.own_state import copies_of_trained
from lightning_diloco.strategy.trainer.lightning_checkpoints import (
    CHECKPOINT_KEY,
    CHECKPOINT_VERSION,
    TUNER_CHECKPOINTS,
    SavedAs,
    load_local,
)
from lightning_diloco.strategy.trainer.parameters import describe, named_parameters
from lightning_diloco.strategy.trainer.paths import OwnPathsFirst, run_root, separate_paths
from lightning_diloco.strategy.trainer.preemption import EXIT_CODE

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_diloco.learner.link import Link
    from lightning_diloco.learner.status import LearnerStatus


# A copy of a strategy, such as the one in a worker of a data loader, takes part in no fit.
_NOT_COPIED = ("_fit", "_leased")


class DiLoCoHooks(DataHooks):
    """Mixin: put it before one of Lightning's strategies."""

    _run_options: dict[str, Any]
    _learner: LearnerConfig
    _token_count_fn: TokenCountFn | None
    _has_inner = False  # whether the user chose the final class, by `inner=`
    _built: ModelDescription | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in _NOT_COPIED}

    @property
    def fleet_tokens(self) -> int:
        """Tokens (or samples) that all learners of the run have seen; 0 outside a run."""
        return self._joined.link.fleet_tokens if self._joined is not None and self.is_global_zero else 0

    @property
    def membership(self) -> tuple[str, str] | None:
        """(run, learner) while this learner is a member of a run; None otherwise."""
        return None if self._joined is None else (self._joined.link.run, self._joined.link.learner_id)

    @property
    def evaluates_anchor(self) -> bool:
        """Whether validation sees the run's anchor rather than this learner's parameters."""
        return self._learner.evaluate == "anchor"

    def _standing(self) -> LearnerStatus | None:
        return None if self._joined is None else self._joined.link.standing()

    @property
    def _exchanging(self) -> bool:
        """See `DiLoCoFit.is_exchanging`; False outside a fit."""
        return self._fit is not None and self._fit.is_exchanging

    # --- launch --------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Initialize Lightning's strategy with the attributes that the Trainer has set so far."""
        raise NotImplementedError

    def _check_devices(self, devices: Sequence[torch.device], num_nodes: int) -> None:
        """Compare `inner=` with the Trainer's devices.

        Raises:
            ConfigError: they do not fit.
        """

    @override
    def _configure_launcher(self) -> None:
        if self._has_inner:
            self._check_devices(self.parallel_devices or [], self.num_nodes)  # type: ignore[attr-defined]
        super()._configure_launcher()
        self._launcher = self._own_launcher()

    def _own_launcher(self) -> _Launcher:
        """Return the launcher that replaces Lightning's and starts the same processes."""
        return OwnPathsFirst(self._separate_paths, self._sigterm_came)

    def _sigterm_came(self) -> None:
        """Note SIGTERM; the signal's handler calls this."""
        if self._fit is not None:
            self._fit.preemption.notice()

    def _separate_paths(self, trainer: pl.Trainer) -> None:
        """Give the learner its own paths, before Lightning looks for anything there."""
        if not wants_link(trainer):
            return
        check_first_fit(self._learner)
        check_hosts(trainer.num_nodes)
        self._root_dir, self._run_root = trainer.default_root_dir, run_root(trainer)
        if (name := learner_id(self._learner)) is not None:
            self._learner = replace(self._learner, learner=name)
            separate_paths(trainer, name)

    # --- start and end -------------------------------------------------------------------------------------------

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, and act on the name of Lightning's barrier.

        "run-stage" is the start of a stage, "train_dataloader()" the preparation of the training loaders.
        """
        super().barrier(name)
        self._preparing_train_loader = name == "train_dataloader()"
        if self._preparing_train_loader:
            self._train_loaders_come()
        if name == "run-stage" and wants_link(self._trainer):
            self._join()

    def _join(self) -> None:
        self._fit = DiLoCoFit(self._trainer, self._token_count_fn)
        self._fit.join()
        self._reload_train_data()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Put the local parameters back and leave the run."""
        try:
            if self._fit is not None:
                self._fit.fail(exception, self._exit_code)
        finally:
            self._close()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        """Leave the run if training did not begin, because `_end` was not called then."""
        try:
            self._leave()
        finally:
            self._close()
        super().teardown()

    def _leave(self) -> None:
        """Leave the run; called when no step follows."""
        if self._fit is not None:
            self._fit.leave()

    def _end(self) -> None:
        """End the fit; called before the callbacks' `on_train_end`."""
        if self._fit is not None:
            self._fit.end()

    def _let_go(self) -> None:
        """Close what belongs to the run; called when the run is left."""
        self._close_leased()

    def _close(self) -> None:
        """Drop the fit; idempotent."""
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close()

    # --- parts of a fit; final classes override some of them -----------------------------------------------------

    @property
    def _holds_all(self) -> bool:
        """Whether this process holds whole parameters, not shards."""
        return True

    @property
    def _exit_code(self) -> int:
        """The exit code of this process after SIGTERM."""
        return EXIT_CODE

    def _note_built(self) -> None:
        """Describe the module as the user's script has built it, before a checkpoint is loaded."""
        assert self.lightning_module is not None
        params = {name: p for name, p in named_parameters(self.lightning_module).items() if p.requires_grad}
        built = describe(self.lightning_module, None, params=params)
        self._built = replace(built, copies=copies_of_trained(self.lightning_module, params))

    def _described(self) -> ModelDescription:
        """Describe the model as it is now and as it was before a checkpoint was loaded."""
        assert self.lightning_module is not None
        built, self._built = self._built, None
        copies = copies_of_trained(self.lightning_module, self._present.params) if self._holds_all else {}
        return replace(self._describe(), copies=copies, built=built)

    def _describe(self) -> ModelDescription:
        assert self.lightning_module is not None
        return describe(self.lightning_module, self._present.counter.unit, params=self._present.params)

    def _make_link(self) -> Link:
        from lightning_diloco.learner.member import Member  # imports pyarrow, which only a fit needs

        return Member(self._run_options, self._learner, self._run_root)

    def _make_device(self, plan: FragmentPlan, config: RunConfig) -> FragmentDevice[Any, Any]:
        return device_for(self.root_device)(plan, self._present.params, config, self._learner)

    def _make_checkpointer(self, owner: Owner, url: str | None) -> LearnerCheckpointer:
        store = None if url is None else CheckpointStore(url)
        return LearnerCheckpointer(self._trainer, owner, store, every_steps=self._learner.checkpoint_every)

    def held_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer for this learner's own checkpoints."""
        return self._present.copies.relative(optimizer, self.optimizer_state(optimizer))

    def give_optimizer_states(self, state: Mapping[str, Any]) -> None:
        """Load the states of all optimizers from `state["optimizer_states"]`."""
        self.load_optimizer_state_dict(state)
        for optimizer, held in zip(self.optimizers, state["optimizer_states"], strict=True):
            self._present.copies.restore(optimizer, held)

    # --- Lightning's checkpoints ---------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with the anchor in place of the local parameters."""
        state = super().lightning_module_state_dict()
        if (fit := self._joined) is not None:
            anchor = fit.named(fit.device.anchor)
            state.update({key: anchor[name] for key, name in fit.aliases.items() if name in anchor and key in state})
        return state

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint, with the local parameters unless it holds weights only."""
        if (fit := self._joined) is not None:
            loops, is_whole = checkpoint.get("loops"), "optimizer_states" in checkpoint
            if is_whole:
                checkpoint[CHECKPOINT_KEY] = {"version": CHECKPOINT_VERSION, "local": self._local_parameters()}
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if fit is None:
            return
        fit.saved[os.fspath(filepath)] = SavedAs(loops, not is_whole, storage_options, os.path.exists(filepath))
        if Path(filepath).name.startswith(TUNER_CHECKPOINTS):
            fit.tuner_checkpoint = os.fspath(filepath)
            fit.link.set_evaluating(True)

    @override
    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint; if it is a tuner's, its trial is over and exchange continues."""
        super().remove_checkpoint(filepath)
        if (fit := self._joined) is None:
            return
        fit.saved.pop(os.fspath(filepath), None)
        if os.fspath(filepath) == fit.tuner_checkpoint:
            fit.tuner_checkpoint = None
            fit.link.set_evaluating(False)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the local parameters for a fit, and the anchor for everything else.

        A learner that begins a run begins it with the local parameters. A learner that joins a run adopts its anchor.
        WeightAveraging loads the trained model itself, later; it finds the local parameters in the checkpoint, too.
        """
        is_fit = self._trainer.state.fn == TrainerFn.FITTING
        if is_fit:
            self._note_built()
        super().load_model_state_dict(checkpoint, strict=strict)
        if is_fit and CHECKPOINT_KEY in checkpoint:
            load_local(self._trainer.lightning_module, checkpoint)

    def _local_parameters(self) -> dict[str, torch.Tensor]:
        return self._present.local_parameters()

    # --- training ------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Write a checkpoint between two batches, if one is due."""
        super().on_train_batch_start(batch, batch_idx)
        if self._fit is not None:
            self._fit.steps.batch_begins()

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Count the tokens of a training batch while it is still on the host, then move it to the device."""
        if self._trainer.training:
            self._note_leased(self._present.counter.add(batch) if self._exchanging else None)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make the step; with automatic optimization it ends an inner step."""
        if (fit := self._fit) is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        is_automatic = self._trainer.lightning_module.automatic_optimization
        if is_automatic:
            self._begin_inner_step()
        with fit.steps.lightning_step(optimizer):
            output = super().optimizer_step(optimizer, fit.steps.settling(closure), model, **kwargs)
        if is_automatic:
            self._end_inner_step(output)
        return output

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a training step; with manual optimization it may end an inner step (rule 1 of inner_steps.py)."""
        if (fit := self._fit) is None or self._trainer.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        self._begin_inner_step()
        output = super().training_step(*args, **kwargs)
        if fit.steps.has_stepped or fit.steps.are_by_hand:
            self._end_inner_step()
        else:
            self._skip_inner_step()
        return output

    def _begin_inner_step(self) -> None:
        """Begin an inner step whose last batch is known; several ranks agree here on the work of the step."""

    def _skip_inner_step(self) -> None:
        """Undo `_begin_inner_step`, because the inner step goes on."""

    def _end_inner_step(self, output: Any = None) -> None:
        if self._fit is not None:
            self._fit.end_inner_step(output)

    # --- validation ----------------------------------------------------------------------------------------------

    @override
    def on_validation_end(self) -> None:
        """Note the results of a validation."""
        if self._fit is not None:
            self._fit.validation.ended()
        super().on_validation_end()

    def _show_anchor(self) -> None:
        """Show the anchor; called before all hooks of a validation."""
        if self._fit is not None:
            self._fit.validation.show_anchor()

    def _show_local(self) -> None:
        """Show the local parameters again; called after all hooks of a validation."""
        if self._fit is not None:
            self._fit.validation.show_local()

    def _drop_gathered(self) -> None:
        """Drop gathered parameters, if there are any, so that the next forward gathers them again."""
