"""Where the outer loop meets Lightning: a strategy's hooks, and nothing of any device or network.

1. A link exists only inside `fit`. It starts at Trainer's barrier "run-stage": by then a checkpoint is restored, the
   model is on its device and optimizers exist, and neither the sanity validation nor a training loader has run.
   validate, test, predict and fast_dev_run start none; nor do the trial fits of a tuner, which call the fit loop.
2. An inner step ends after `optimizer_step`, once per real step. With manual optimization it ends after a
   `training_step` in which any optimizer stepped: before, gradients may still be computed with the parameters. Steps
   that do not pass through Lightning count, too (strategy/trainer/raw_steps.py).
3. We change parameters only at the end of an inner step, around validation, and when the run is left: as soon as it is
   known that no step follows, before the last validation and the last checkpoints, and in any case before the
   callbacks' `on_train_end` (strategy/trainer/last_step.py). From there on the module is an ordinary one.
4. What is snapshotted at the end of an inner step may be copied while the next forward and backward compute. It is
   settled when these are done, before gradients are clipped and any optimizer changes parameters; also before
   validation. Who changes parameters elsewhere (clamping at a batch's start or end, `max_norm` of an embedding, an
   optimizer that steps within the backward) may have some values sent as they were before, and some as they became.
   Both are right: what is sent counts, and the rest stays progress, for the next time.
5. Validation and the end of training begin before any callback's hook (trainer/outermost.py), validation ends after
   all.
6. What is in Lightning's checkpoints is decided in trainer/lightning_checkpoints.py, which data this learner reads in
   data/hooks.py and data/leasing.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices import device_for
from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.errors import DiLoCoError, RunOverError
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.storage.checkpoint_store import CheckpointStore
from lightning_diloco.strategy.data.hooks import SplitsData, wants_link
from lightning_diloco.strategy.data.split import fork_random_state
from lightning_diloco.strategy.data.token_counter import TokenCounter, TokenCountFn, check_training_step
from lightning_diloco.strategy.identity import check_first_fit, given_join, learner_id, note_last_step
from lightning_diloco.strategy.recovery.checkpointer import LearnerCheckpointer, Owner
from lightning_diloco.strategy.recovery.own_state import OwnState, copies_of_trained, follow
from lightning_diloco.strategy.trainer.last_step import LastStep
from lightning_diloco.strategy.trainer.lightning_checkpoints import AnchorInCheckpoints
from lightning_diloco.strategy.trainer.losses import (
    NOT_DRAINED,
    NOT_VALIDATED,
    Verdict,
    train_loss,
    val_loss,
    validate_final,
    verdict,
)
from lightning_diloco.strategy.trainer.lr_schedules import hold_schedules, refresh_schedules
from lightning_diloco.strategy.trainer.optimizer_copies import ParameterCopies
from lightning_diloco.strategy.trainer.outermost import Outermost
from lightning_diloco.strategy.trainer.parameters import aliases, describe, named_parameters, trainable_parameters
from lightning_diloco.strategy.trainer.paths import (
    OwnPathsFirst,
    checkpoint_url,
    mark_finished,
    run_root,
    separate_paths,
)
from lightning_diloco.strategy.trainer.preemption import EXIT_CODE, Preemption
from lightning_diloco.strategy.trainer.progress_bar import ProgressFields
from lightning_diloco.strategy.trainer.raw_steps import RawSteps
from lightning_diloco.strategy.trainer.stopping import Stopping
from lightning_diloco.strategy.trainer.unfreezing import check_frozen, may_be_unfrozen

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_diloco.learner.link import Link
    from lightning_diloco.learner.status import LearnerStatus

log = logging.getLogger(__name__)

_LEFT_WITH_WORK = (
    "the run was left at step %d before all of this learner's work was merged: its syncer could not be reached, or was "
    "not done in time. The module, and checkpoints of this step, keep this learner's own parameters, with all that it "
    "trained, instead of the run's anchor. Save them (trainer.save_checkpoint); fit(ckpt_path=...) without a join "
    "string begins a new run with them"
)


# Of one process and one fit; a copy of a strategy, such as in a worker of a data loader, is without.
_NOT_COPIED = (
    "_link",
    "_left",
    "_device",
    "_checkpointer",
    "_preemption",
    "_leased",
    "_raw_steps",
    "_copies",
    "own_state",
)


class DiLoCoHooks(AnchorInCheckpoints, SplitsData, Strategy):
    """Mixin: put it before one of Lightning's strategies."""

    _run_options: dict[str, Any]
    _learner: LearnerConfig
    _token_count_fn: TokenCountFn | None
    _link: Link | None = None
    _device: FragmentDevice | None = None
    _progress: ProgressFields | None = None
    _checkpointer: LearnerCheckpointer | None = None
    _preemption: Preemption | None = None
    _stopping: Stopping | None = None
    _last_step: LastStep | None = None
    _left: Link | None = None  # of a run that was left, and nobody else is in it
    _verdict: Verdict = (None, NOT_VALIDATED)
    _raw_steps: RawSteps | None = None
    _outermost: Outermost | None = None
    _built: ModelDescription | None = None
    _stepped = False
    _has_inner = False  # whether the user chose the final class, by `inner=`

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in _NOT_COPIED}

    @property
    def fleet_tokens(self) -> int:
        """Tokens (or samples) that all learners of the run have seen; 0 before it is joined, and at ranks but 0."""
        return self._link.fleet_tokens if self._link is not None and self.is_global_zero else 0

    @property
    def membership(self) -> tuple[str, str] | None:
        """(run, learner) while this process takes part in a run."""
        return (self._link.run, self._link.learner_id) if self._link else None

    @property
    def exchanged(self) -> Mapping[str, nn.Parameter]:
        """Parameters that are exchanged, by name; some may be frozen for now."""
        return self._params

    @property
    def evaluates_anchor(self) -> bool:
        """Whether validation sees the run's anchor, rather than this learner's own parameters."""
        return self._learner.evaluate == "anchor"

    @property
    def _given_join(self) -> str | None:
        return given_join(self._learner)

    @property
    def _holds_all(self) -> bool:
        """Whether this process holds parameters whole."""
        return True

    @property
    def _exchanging(self) -> bool:
        return self._link is not None and self._tuner_checkpoint is None

    # --- start and end -------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Initialize Lightning's strategy with what the Trainer has set so far."""
        raise NotImplementedError

    def _check_devices(self, devices: Sequence[torch.device], num_nodes: int) -> None:
        """Compare `inner=` with what the Trainer decided.

        Raises:
            ConfigError: they do not fit.
        """

    def _configure_launcher(self) -> None:
        if self._has_inner:
            self._check_devices(self.parallel_devices or [], self.num_nodes)
        super()._configure_launcher()
        self._launcher = self._own_launcher()

    def _own_launcher(self) -> _Launcher:
        """Starts what Lightning's would, in paths of this learner's own."""
        return OwnPathsFirst(self._separate_paths, self._sigterm_came)

    def _separate_paths(self, trainer: pl.Trainer) -> None:
        """Give the learner paths of its own, before anything is looked for there, or opened."""
        if not wants_link(trainer):
            return
        check_first_fit(self._learner)
        self._root_dir, self._run_root = trainer.default_root_dir, run_root(trainer)
        if (name := learner_id(self._learner)) is not None:
            self._learner = replace(self._learner, learner=name)
            separate_paths(trainer, name)

    def barrier(self, name: str | None = None) -> None:
        """Lightning names the places it passes: the start of a stage, and whose loader it prepares."""
        super().barrier(name)
        self._preparing_train_loader = name == "train_dataloader()"
        if self._preparing_train_loader:
            self._train_loaders_come()
        if name == "run-stage" and wants_link(self._trainer):
            self._join()

    def _join(self) -> None:
        assert self.lightning_module is not None
        check_training_step(self.lightning_module)
        self._preemption = Preemption(self._learner.preemption_s)
        self._params = trainable_parameters(self.lightning_module, may_be_unfrozen(self._trainer))
        every = named_parameters(self.lightning_module)
        self._frozen = {name: p for name, p in every.items() if name not in self._params}
        self._aliases = aliases(self.lightning_module)
        self._counter = TokenCounter(self._token_count_fn)
        self._copies = ParameterCopies(self._params)
        self._copies.look(self._trainer.optimizers)
        self._stepped, self._tuner_checkpoint, self._saved = False, None, {}
        self._link = self._make_link()
        try:
            model = self._described()
            self._link.start(model, self._make_device_with_copies)
        except RunOverError as over:  # who starts learners again need not start this one
            if self.is_global_zero:
                log.warning("%s", over)
            raise SystemExit(0) from over
        if model.copies:
            differing = self.broadcast(sorted(self._link.differing) if self.is_global_zero else [])
            follow(self.lightning_module, model.copies, differing)
        self.own_state = OwnState(self.lightning_module, self._frozen)
        self._heal()
        self._outermost = Outermost(self._validation_starts, self._leave)
        self._outermost.install(self._trainer)
        self._raw_steps = RawSteps(self._params.values(), self._raw_step)
        self._stopping = Stopping(self._trainer, self._learner.max_fleet_tokens, self.evaluates_anchor)
        self._stopping.heed(self._link)
        self._last_step = LastStep(self._trainer, self._leave, self._end)
        refresh_schedules(self._trainer)
        if (bar := self._trainer.progress_bar_callback) is not None:
            self._progress = ProgressFields(bar, self._standing)
        self._reload_train_data()

    def _heal(self) -> None:
        """Go on from a checkpoint, where this process is not the first of its learner or joins late."""
        assert self._link is not None
        link, chosen = self._link, self._learner
        fork_random_state(link.learner_id, link.incarnation)
        url = checkpoint_url(chosen.checkpoint_store, link.own_run_dir, self._root_dir, link.run)
        owner = Owner(link.run, link.learner_id, link.incarnation)
        self._checkpointer = self._make_checkpointer(owner, url if chosen.checkpoint_every else None)
        if link.is_late:
            run_steps = self.broadcast(link.run_steps if self.is_global_zero else 0)
            self._checkpointer.heal(warm_up_steps=link.config.sync_every, run_steps=run_steps)
        else:
            self._checkpointer.heal()

    def _note_built(self) -> None:
        """See `AnchorInCheckpoints._note_built`."""
        assert self.lightning_module is not None
        params = {name: p for name, p in named_parameters(self.lightning_module).items() if p.requires_grad}
        built = describe(self.lightning_module, None, params=params)
        self._built = replace(built, copies=copies_of_trained(self.lightning_module, params))

    def _described(self) -> ModelDescription:
        """The model, and what it was before a checkpoint."""
        assert self.lightning_module is not None
        built, self._built = self._built, None
        copies = copies_of_trained(self.lightning_module, self._params) if self._holds_all else {}
        return replace(self._describe(), copies=copies, built=built)

    def _standing(self) -> LearnerStatus | None:
        return None if self._link is None else self._link.standing()

    def _describe(self) -> ModelDescription:
        assert self.lightning_module is not None
        return describe(self.lightning_module, self._counter.unit, params=self._params)

    def _make_checkpointer(self, owner: Owner, url: str | None) -> LearnerCheckpointer:
        store = None if url is None else CheckpointStore(url)
        return LearnerCheckpointer(self._trainer, owner, store, every_steps=self._learner.checkpoint_every)

    def _make_link(self) -> Link:
        from lightning_diloco.learner.link import Link  # the wire and its libraries, needed only here

        return Link(self._run_options, self._learner, self._run_root)

    def _make_device_with_copies(self, plan: FragmentPlan, config: RunConfig) -> FragmentDevice[Any, Any]:
        device = self._make_device(plan, config)
        self._copies.attach(device)
        return device

    def _make_device(self, plan: FragmentPlan, config: RunConfig) -> FragmentDevice:
        self._device = device_for(self.root_device)(plan, self._params, config, self._learner)
        return self._device

    def _leave(self) -> None:
        """No step follows: send the last contributions, wait for them, and leave the anchor in the module."""
        if not self._exchanging:
            return
        assert self._link is not None
        assert self._device is not None
        assert self._stopping is not None
        link = self._link
        if (reason := self._stopping.why_all_end()) is not None and self.is_global_zero:
            link.stop_run(reason)
        note_last_step(self._learner)
        is_last = link.finish()
        if link.is_drained:
            self._device.show_anchor()  # for good
            if self.is_global_zero:
                mark_finished(link.learner_id)
        elif self.is_global_zero:
            log.warning(_LEFT_WITH_WORK, self._trainer.global_step)
        self._verdict = (None, NOT_VALIDATED if link.is_drained else NOT_DRAINED)
        self._let_go()
        if is_last:
            self._left = link  # it is asked about the final anchor
        else:
            link.close()
        self._save_again()

    def _end(self) -> None:
        """Before callbacks' `on_train_end`: the last learner says what it found when it validated the final anchor."""
        self._leave()
        if self._link is not None:  # only a trial is over
            return
        try:
            if self._left is not None:
                joined_others = self._given_join is not None
                problem = validate_final(self._trainer) if joined_others and self._verdict[1] == NOT_VALIDATED else None
                self._left.report(*((None, problem) if problem else self._verdict))
        finally:
            self._close()

    def _let_go(self) -> None:
        """From here on the module is an ordinary one; the link is the caller's to close."""
        if self._progress is not None:
            self._progress.remove()
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._raw_steps is not None:
            self._raw_steps.close()
        if self._outermost is not None:
            self._outermost.remove(self._trainer)
        self._close_leased()
        self._link = self._device = self._progress = self._checkpointer = self._stopping = self._tuner_checkpoint = None
        self._raw_steps = self._outermost = self._copies = None

    def _close(self) -> None:
        """Let go of everything that a fit holds; idempotent."""
        links = (self._link, self._left)
        self._let_go()
        for each in (self._preemption, self._last_step, *links):
            if each is not None:
                each.close()
        self._left = self._preemption = self._last_step = None

    def on_exception(self, exception: BaseException) -> None:
        """Put the local parameters back and let go of the run."""
        try:
            if self._device is not None:
                self._device.show_local()
            if isinstance(exception, SIGTERMException) and self._preemption is not None:
                exception.code = self._exit_code
                self._leave_in_time(self._preemption)
        finally:
            self._close()
        super().on_exception(exception)

    @property
    def _exit_code(self) -> int:
        return EXIT_CODE

    def _sigterm_came(self) -> None:
        if self._preemption is not None:
            self._preemption.notice()

    def _leave_in_time(self, preemption: Preemption) -> None:
        """Pre-empted: a checkpoint is written while the last contributions are merged."""
        if self._link is None or self._checkpointer is None:
            return
        self._checkpointer.take()
        try:
            self._link.finish("preempted", preemption.left_s)
        except DiLoCoError as error:
            log.warning("the run was left without a farewell: %s", error)
        is_stored = self._checkpointer.wait(preemption.left_s) and self._learner.checkpoint_every > 0
        log.warning("pre-empted; the run was left with%s a checkpoint", "" if is_stored else "out")

    def held_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What a learner's own checkpoint holds of an optimizer."""
        return self._copies.relative(optimizer, self.optimizer_state(optimizer))

    def give_optimizer_states(self, state: Mapping[str, Any]) -> None:
        """The inverse for all optimizers, which are in `state["optimizer_states"]`."""
        self.load_optimizer_state_dict(state)
        for optimizer, held in zip(self.optimizers, state["optimizer_states"], strict=True):
            self._copies.restore(optimizer, held)

    def teardown(self) -> None:
        """A fit that had nothing to train never ends its training; it leaves here."""
        try:
            self._leave()
        finally:
            self._close()
        super().teardown()

    # --- training ------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Between two batches: the place for checkpoints."""
        super().on_train_batch_start(batch, batch_idx)
        if self._raw_steps is not None:
            self._raw_steps.batch_begins()
        if self._exchanging and self._checkpointer is not None and (held_up_s := self._checkpointer.batch_begins()):
            assert self._link is not None
            self._link.held_up(held_up_s)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Count the tokens of training batches while they are still on the host."""
        if self._trainer.training:
            self._note_leased(self._counter.add(batch) if self._exchanging else None)
        return super().batch_to_device(batch, device, dataloader_idx)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """The real step, then the outer loop's share of it."""
        if self._raw_steps is not None:
            self._raw_steps.is_known = True
        with self._checkpointer.warm_up.slowed(optimizer) if self._checkpointer else nullcontext():
            output = super().optimizer_step(optimizer, self._settling(closure), model, **kwargs)
        if self._raw_steps is not None:
            self._raw_steps.is_known = False
        self._stepped = True
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            self._end_inner_step(output)
        return output

    def _settling(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Forward and backward, which need no more than the parameters as they are; then they may change."""
        if (link := self._link) is None:
            return closure

        def compute() -> Any:
            output = closure()
            link.settle()
            return output

        return compute

    @contextmanager
    def _raw_step(self, optimizer: Optimizer) -> Iterator[None]:
        """A step that Lightning does not see. With automatic optimization, the first one of a batch ends it."""
        assert self.lightning_module is not None
        if not self._exchanging or not self._trainer.training:
            yield
            return
        assert self._link is not None
        assert self._checkpointer is not None
        ends = self.lightning_module.automatic_optimization and self._counter.has_counted
        if ends:
            self._begin_inner_step()
        self._link.settle()
        with self._checkpointer.warm_up.slowed(optimizer):
            yield
        self._copies.look([optimizer])
        self._stepped = True
        if ends:
            self._end_inner_step()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """With manual optimization, the end of an inner step if any optimizer stepped in it."""
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization and self._stepped:
            self._end_inner_step()
        return output

    def _begin_inner_step(self) -> None:
        """Its last batch is known; other ranks are told."""

    def _end_inner_step(self, output: Any = None) -> None:
        self._stepped = False
        if self._link is None and self._last_step is not None and not self._trainer.fit_loop._skip_backward:
            rank_zero_warn(
                "Training goes on after its last step, when the run was left: a callback has reset should_stop, or "
                "raised max_epochs. From here on this learner trains alone."
            )
        if not self._exchanging:
            return
        self._saved.clear()
        assert self._link is not None
        assert self._checkpointer is not None
        check_frozen(self._trainer, self._frozen)
        self._copies.look(self._trainer.optimizers)
        self._checkpointer.step_done()
        if self._preemption is not None:
            self._preemption.has_trained = True
        hold_schedules(self._trainer)
        connector = self._trainer._logger_connector
        is_there = self.root_device.type == "cpu"  # elsewhere a thread waits for it, no more often than Lightning logs
        if is_there or connector.should_update_logs:
            self._link.set_loss(train_loss(self._trainer, output), aside=not is_there)
        self._link.trainer_step = self._trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        self._link.step(*self._counter.take())
        assert self._stopping is not None
        self._stopping.heed(self._link)
        if self._trainer.loggers and connector.should_update_logs:
            # With the step of the user's own metrics; given explicitly, none of them is changed or flushed.
            connector.log_metrics(self._link.metrics(), step=self._trainer.fit_loop.epoch_loop._batches_that_stepped)

    # --- validation ----------------------------------------------------------------------------------------------

    def _validation_starts(self) -> None:
        """Validate the anchor. The sanity check has nothing to swap: parameters and anchor are still the same."""
        if self._exchanging and not self._trainer.sanity_checking:
            self._set_evaluating(True)
            assert self._link is not None
            assert self._stopping is not None
            self._stopping.validation_starts(self._link)

    def on_validation_end(self) -> None:
        """Back to the local parameters."""
        if self._exchanging and not self._trainer.sanity_checking:
            self._set_evaluating(False)
            assert self._link is not None
            assert self._stopping is not None
            if self.evaluates_anchor:
                self._stopping.anchor_was_validated(self._link)
            if self.evaluates_anchor and (loss := val_loss(self._trainer)) is not None:
                self._link.set_eval_loss(loss)
        elif self._left is not None and self._verdict[1] == NOT_VALIDATED:
            self._verdict = verdict(self._trainer)  # the module holds the final anchor
        super().on_validation_end()

    def _set_evaluating(self, evaluating: bool) -> None:
        assert self._link is not None
        assert self._device is not None
        self._link.set_evaluating(evaluating)
        if self._learner.evaluate == "anchor":
            (self._device.show_anchor if evaluating else self._device.show_local)()
