"""One learner's part in a run, for the duration of one fit.

1. The object is created when the fit is about to train, and dropped when the fit is over. A strategy holds at most one.
2. It has three phases. While it joins, it makes its parts one after the other. While it is a member, parameters are
   exchanged. After it has left, the module is an ordinary one, and Lightning validates and saves for the last time.
3. Each part registers how it is closed when it is made. An exception in any phase closes the parts that exist by then.
4. A tuner's trial interrupts the exchange, from the tuner's checkpoint until the tuner removes the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.devices.dense import DenseFragments
from lightning_diloco.errors import RunOverError
from lightning_diloco.learner.name import given_address
from lightning_diloco.process.exit import fail_at_exit
from lightning_diloco.strategy.data.split import fork_random_state
from lightning_diloco.strategy.data.token_counter import TokenCounter, TokenCountFn, check_training_step
from lightning_diloco.strategy.identity import note_last_step
from lightning_diloco.strategy.inner_steps import InnerSteps
from lightning_diloco.strategy.recovery.checkpointer import LearnerCheckpointer, Owner
from lightning_diloco.strategy.recovery.own_state import OwnState, follow
from lightning_diloco.strategy.trainer.last_step import LastStep
from lightning_diloco.strategy.trainer.lightning_checkpoints import SavedAs, save_again
from lightning_diloco.strategy.trainer.lr_schedules import refresh_schedules
from lightning_diloco.strategy.trainer.optimizer_copies import ParameterCopies
from lightning_diloco.strategy.trainer.outermost import AroundValidation, Outermost
from lightning_diloco.strategy.trainer.parameters import aliases, named_parameters, named_values, trainable_parameters
from lightning_diloco.strategy.trainer.paths import checkpoint_url, mark_finished
from lightning_diloco.strategy.trainer.preemption import Preemption
from lightning_diloco.strategy.trainer.progress_bar import ProgressFields
from lightning_diloco.strategy.trainer.stopping import Stopping
from lightning_diloco.strategy.trainer.unfreezing import may_be_unfrozen, warn_of_untrained
from lightning_diloco.strategy.validation import Validation

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_diloco.learner.link import Link

log = logging.getLogger(__name__)

_LEFT_WITH_WORK = (
    "the run was left at step %d before all of this learner's work was merged: its syncer could not be reached, or was "
    "not done in time. The module, and checkpoints of this step, keep this learner's own parameters, with all that it "
    "trained, instead of the run's anchor. Save them (trainer.save_checkpoint); fit(ckpt_path=...) without a join "
    "string begins a new run with them"
)
_STARTED_AGAIN = (
    "the run was left at step {step} before all of this learner's work was merged, so the run has lost some of it. "
    "Start this learner again: it goes on from its last checkpoint and trains the steps since then again"
)

_PREEMPTED_AT_THE_END = (
    "pre-empted at the end of training, at step %d, %s all of this learner's work was merged. Its next process goes on "
    "from its last checkpoint and trains the steps since then again"
)

_NOTHING_COUNTED = (
    "%d batches were trained, but no inner step was counted, so nothing was exchanged. The module, and checkpoints of "
    "this step, keep this learner's own parameters. With manual optimization, call step() of the optimizers that "
    "configure_optimizers returns; if your own code updates the parameters, do not return optimizers that hold them"
)


class DiLoCoFit:
    """One fit; call `join` first.

    Args:
        trainer: a Trainer with this strategy that is about to train and has optimizers.
        token_count_fn: counts the tokens of a batch; None: `TokenCounter` finds them.

    Attributes:
        params: exchanged parameters by name; some may be frozen for now.
        frozen: the other parameters by name.
        aliases: names of parameters, by their names in the module's state.
        counter: counts the batches of an inner step.
        copies: the optimizers' copies of parameters.
        preemption: watches for SIGTERM.
        validation: handles each validation.
        link: the link to the syncer; `join` makes this and the attributes up to `steps`.
        device: holds the fragments' anchors.
        own_state: the module's state that is not exchanged.
        checkpointer: writes this learner's checkpoints.
        stopping: decides when training stops.
        steps: handles each inner step.
        is_member: whether the run was joined and not yet left.
        tuner_checkpoint: path of the checkpoint that a tuner restores after its trial; None: there is no trial.
        saved: Lightning's checkpoints since the last step, by path.
    """

    link: Link
    device: FragmentDevice[Any, Any]
    own_state: OwnState
    checkpointer: LearnerCheckpointer
    stopping: Stopping
    steps: InnerSteps

    def __init__(self, trainer: pl.Trainer, token_count_fn: TokenCountFn | None) -> None:
        module = trainer.lightning_module
        check_training_step(module)
        self._strategy: Any = trainer.strategy  # the hooks (hooks.py), which differ between devices
        self._trainer = trainer
        self._module = module
        self.params = trainable_parameters(module, may_be_unfrozen(trainer))
        warn_of_untrained(trainer, self.params)
        self.frozen = {name: p for name, p in named_parameters(module).items() if name not in self.params}
        self.aliases = aliases(module)
        self.counter = TokenCounter(token_count_fn)
        self.copies = ParameterCopies(self.params)
        self.copies.look(trainer.optimizers)
        self.validation = Validation(trainer, self)
        self.is_member = False
        self.tuner_checkpoint: str | None = None
        self.saved: dict[str, SavedAs] = {}
        self._lost: str | None = None
        self._in_run, self._in_fit, self._linked = ExitStack(), ExitStack(), ExitStack()
        self.preemption = Preemption(self._strategy._learner.preemption_s)
        self._in_fit.callback(self.preemption.close)

    @property
    def is_exchanging(self) -> bool:
        """Whether the present steps are part of the run; the steps of a tuner's trial are not."""
        return self.is_member and self.tuner_checkpoint is None

    # --- joining -------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Join the run: block until the module has the run's values, or has given the run its first ones.

        Raises:
            JoinError: the syncer cannot be reached, or refused.
            SystemExit: the run is over; the exit code is 0, so that this learner is not started again.
        """
        strategy, trainer = self._strategy, self._trainer
        self.link = strategy._make_link()
        self._linked.callback(self.link.close)
        self._in_fit.callback(self._linked.close)
        model = strategy._described()
        try:
            self.link.start(model, self._make_device)
        except RunOverError as over:
            if strategy.is_global_zero:
                log.warning("%s", over)
            raise SystemExit(0) from over
        self.is_member = True
        self._in_run.callback(strategy._let_go)
        if model.copies:
            differing = strategy.broadcast(sorted(self.link.differing) if strategy.is_global_zero else [])
            follow(self._module, model.copies, differing)
        self.own_state = OwnState(self._module, self.frozen)
        self._restore()
        self._watch()
        refresh_schedules(trainer)

    def _make_device(self, plan: FragmentPlan, config: RunConfig) -> FragmentDevice[Any, Any]:
        self.device = self._strategy._make_device(plan, config)
        self.copies.attach(self.device)
        return self.device

    def _restore(self) -> None:
        """Continue from a checkpoint, if there is one; a late learner without a checkpoint warms up."""
        strategy, link = self._strategy, self.link
        chosen = strategy._learner
        fork_random_state(link.learner_id, link.incarnation)
        url = checkpoint_url(chosen.checkpoint_store, link.own_run_dir, strategy._root_dir, link.run)
        owner = Owner(link.run, link.learner_id, link.incarnation)
        self.checkpointer = strategy._make_checkpointer(owner, url if chosen.checkpoint_every else None)
        self._in_run.callback(self.checkpointer.close)
        if link.is_late:
            run_steps = strategy.broadcast(link.run_steps if strategy.is_global_zero else 0)
            self.checkpointer.heal(warm_up_steps=link.config.sync_every, run_steps=run_steps)
        else:
            self.checkpointer.heal()

    def _watch(self) -> None:
        """Watch the Trainer from now on.

        The Trainer holds methods of the strategy only, because a copy of the Trainer must not copy the fit.
        """
        strategy, trainer = self._strategy, self._trainer
        chosen = strategy._learner
        self.stopping = Stopping(trainer, chosen.max_fleet_tokens, strategy.evaluates_anchor)
        around = AroundValidation(trainer, strategy._show_anchor, strategy._show_local)
        self._in_run.callback(around.close)
        outermost = Outermost(strategy._leave)
        outermost.install(trainer)
        self._in_run.callback(outermost.remove, trainer)
        self.steps = InnerSteps(trainer, self)
        self._in_run.callback(self.steps.close)
        self.stopping.heed(self.link)
        self._in_fit.callback(LastStep(trainer, strategy._leave, strategy._end).close)
        if (bar := trainer.progress_bar_callback) is not None:
            self._in_run.callback(ProgressFields(bar, strategy._standing).remove)

    # --- training ------------------------------------------------------------------------------------------------

    def named(self, values: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the values of all parameters by name, from the values of each fragment."""
        return named_values(self.link.plan, self.link.config.block_size, self.params, values)

    def local_parameters(self) -> dict[str, torch.Tensor]:
        """Return the local parameters by name, in float64 if one of them is."""
        values: Callable[[int], torch.Tensor] = self.device.local_values
        if isinstance(self.device, DenseFragments) and any(p.dtype == torch.float64 for p in self.params.values()):
            values = partial(self.device.local_values, dtype=torch.float64)
        return self.named(values)

    def end_inner_step(self, output: Any) -> None:
        """Exchange what is due after an inner step, and check whether training stops."""
        self.steps.has_stepped = False
        if not self.is_member and not self._trainer.fit_loop._skip_backward:
            rank_zero_warn(
                "Training goes on after its last step, when the run was left: a callback has reset should_stop, or "
                "raised max_epochs. From here on this learner trains alone."
            )
        if self.is_exchanging:
            self.saved.clear()
            self.steps.ended(output)

    # --- the end -------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the run when no step follows.

        Send the last contributions and wait until they are merged. The anchor then stays in the module. If they are not
        merged in time, or no inner step was counted, the local parameters stay.

        Raises:
            SIGTERMException: SIGTERM came meanwhile; the run is left.
        """
        if not self.is_exchanging:
            return
        strategy, link = self._strategy, self.link
        if (reason := self.stopping.why_all_end()) is not None and strategy.is_global_zero:
            link.stop_run(reason)
        note_last_step(strategy._learner)
        is_last, is_drained = link.finish(asked=self._asked_to_leave), link.is_drained
        shows_anchor = is_drained and not self.steps.are_missed
        if shows_anchor:
            self.device.show_anchor()  # permanently
        if strategy.is_global_zero:
            self._tell_end(is_drained)
        self._leave_run()
        if is_last:  # the syncer waits for the loss of the final anchor
            self.validation.anchor_is_final(is_drained=shows_anchor)
        else:
            self._linked.close()
        save_again(self._trainer, self.saved)
        if link.is_preempted:
            raise SIGTERMException

    def _asked_to_leave(self) -> float | None:
        """Return the seconds that remain after SIGTERM; None if no rank has received it."""
        if self.link.agreed.num_asked:
            self.preemption.notice()
        return self.preemption.asked()

    def _tell_end(self, is_drained: bool) -> None:
        if self.steps.are_missed:
            log.warning(_NOTHING_COUNTED, self.steps.num_batches)
        if self.link.is_preempted:
            log.warning(_PREEMPTED_AT_THE_END, self._trainer.global_step, "after" if is_drained else "before")
        elif is_drained:
            mark_finished(self.link.learner_id)
        else:
            log.warning(_LEFT_WITH_WORK, self._trainer.global_step)
            if given_address(self._strategy._learner) is not None:
                self._lost = _STARTED_AGAIN.format(step=self._trainer.global_step)

    def end(self) -> None:
        """End the fit when training ends; do nothing if only a tuner's trial ends."""
        self.leave()
        if self.is_member:
            return
        try:
            self.validation.report_final()
        finally:
            self._strategy._close()

    def fail(self, exception: BaseException, exit_code: int) -> None:
        """Put the local parameters back after an exception, and leave the run after SIGTERM.

        Args:
            exception: the exception that ends training; a SIGTERMException gets the exit code.
            exit_code: exit code of this process after SIGTERM.
        """
        if self.is_member:
            self.device.show_local()
        if isinstance(exception, SIGTERMException):
            exception.code = exit_code
            if self.is_member:
                self.preemption.leave_run(self.link, self.checkpointer)

    def close(self) -> None:
        """Close everything that this fit holds; idempotent.

        If work was lost to a run that others have started, this process ends with exit code 1. In a run of its own, the
        module has everything.
        """
        try:
            self._leave_run()
        finally:
            self._in_fit.close()
            if self._lost is not None:
                fail_at_exit(self._lost)

    def _leave_run(self) -> None:
        """Close what belongs to the run; from here on the module is an ordinary one."""
        self.is_member = False
        self.tuner_checkpoint = None
        self._in_run.close()
