"""A learner's checkpoints, from which its next process continues.

1. Every N inner steps, the training thread copies the Trainer's state, and a background thread writes it. While it
   writes, no checkpoint is taken. A slow store makes checkpoints rarer, but does not slow training. If the store fails,
   a warning says so, once for each reason, and training goes on.
2. Checkpoints hold no parameters. These come from the run's anchors, so that nothing is counted twice and a restarted
   learner changes nothing in the run.
3. A new process takes the newest checkpoint of its learner. If none fits, it takes the newest one of a peer without the
   peer's own state (trainer_state.py). If none of those fits either, it begins with a warm-up (lr_warmup.py) and with
   schedules at the run's position (trainer/lr_schedules.py), unless this learner begins the run.
4. Checkpoints that are damaged or do not fit are skipped with a warning. A user's `ckpt_path` takes precedence.
5. `diloco snapshot` leaves a marker in the store; the next step boundary answers it with a checkpoint.
6. A process does not continue from its own checkpoints: a second fit of a script is a new one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from lightning_diloco.errors import StorageError
from lightning_diloco.process.threads import Crew, Jobs
from lightning_diloco.storage.checkpoint_file import Checkpoint
from lightning_diloco.storage.checkpoint_store import CheckpointStore, Entry
from lightning_diloco.storage.tree import UnstorableError
from lightning_diloco.strategy.data.split import START, Position
from lightning_diloco.strategy.recovery import trainer_state
from lightning_diloco.strategy.recovery.lr_warmup import WarmUp
from lightning_diloco.strategy.recovery.trainer_state import State
from lightning_diloco.strategy.trainer.lr_schedules import advance_schedules

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_S = 5.0
LOOK_S, LOOK_FAR_S = 1.0, 15.0
PROCESS = uuid.uuid4().hex
ONE_DEVICE = "one device"


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner of checkpoints: run id, learner id and the learner's present incarnation."""

    run: str
    learner: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, or a rank's part of one, that fits."""

    learner: str
    step: int
    state: State
    is_own: bool


class LearnerCheckpointer:
    """The checkpoints of one fit; the training thread calls the methods.

    Args:
        trainer: a Trainer that is about to train.
        owner: owner of the checkpoints.
        store: store of the checkpoints; None: none are read or written.
        every_steps: N, inner steps between two checkpoints.
        layout: how several ranks hold the model; None if one device holds it.

    Attributes:
        warm_up: warm-up of the optimizer.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        owner: Owner,
        store: CheckpointStore | None,
        *,
        every_steps: int,
        layout: str | None = None,
    ) -> None:
        self._trainer = trainer
        self._owner = owner
        self._store = store
        self._every_steps = every_steps
        self._layout = layout
        self._begins: Position | None = None
        self._pending: Found | None = None
        self._steps_since = 0
        self._is_after_step = False
        self._asked: str | None = None
        self._answered: str | None = None
        self._told: set[str] = set()
        self._callbacks_left_out: set[str] = set()
        self._error: BaseException | None = None
        self._written = threading.Event()
        self._written.set()
        self._is_stored = False
        self._crew = Crew(self._fail)
        self._jobs: Jobs | None = None
        self.warm_up = WarmUp()

    # ------------------------------------------------------------------------------------------------------- recovery

    def heal(self, *, warm_up_steps: int = 0, run_steps: int = 0) -> None:
        """Continue from a checkpoint of the store, unless the user has named a `ckpt_path`.

        Args:
            warm_up_steps: length of the warm-up if there is no checkpoint; 0 if this learner begins the run.
            run_steps: step at which schedules by steps begin if there is no checkpoint.
        """
        if self._store is not None:
            self._crew.start("markers", self._watch_for_markers)
        if self._trainer.ckpt_path is not None:
            log.info("this learner goes on from ckpt_path=%s", self._trainer.ckpt_path)
            return
        found = self._find() if self._store is not None else None
        if found is None:
            self.warm_up = WarmUp(warm_up_steps)
            if warm_up_steps:
                log.warning(
                    "no checkpoint of this learner or of a peer: its optimizer warms up for %d steps%s",
                    warm_up_steps,
                    advance_schedules(self._trainer, run_steps),
                )
            return
        trainer_state.give(self._trainer, found.state, is_own=found.is_own)
        self._begins = trainer_state.position(found.state)
        self._pending = found
        whose = "its own" if found.is_own else f"peer {found.learner}'s"
        own = "" if found.is_own else ", with data and random numbers of its own"
        log.warning("learner %s goes on from %s checkpoint of step %d%s", self._owner.learner, whose, found.step, own)

    @property
    def position(self) -> Position:
        """Where this fit begins: the epoch, and how many of its batches were trained."""
        return self._begins or START

    def data_is_ready(self, *, is_at_position: bool) -> None:
        """Note that the training loader was made, and whether it begins at `position`."""
        if self._begins and is_at_position:
            # Lightning does not know that the loader resumes, and warns that it does not.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
        elif self._begins:
            log.warning(
                "the data loader cannot resume: unless the datamodule restores its position, the epoch begins again"
            )

    def _find(self) -> Found | None:
        """Return the best checkpoint that fits this Trainer; None if there is none."""
        for entry, checkpoint in self._offers():
            if (found := self._fitting(entry.learner, entry.step, checkpoint)) is not None:
                return found
        return None

    def _fitting(self, learner: str, step: int, checkpoint: Checkpoint) -> Found | None:
        state, is_own = cast("State", checkpoint.state), learner == self._owner.learner
        if problem := trainer_state.objection(self._trainer, state, is_own=is_own):
            log.warning("the checkpoint of step %d of %s does not fit: %s", step, learner, problem)
            return None
        return Found(learner, step, state, is_own)

    def _offers(self) -> Iterator[tuple[Entry, Checkpoint]]:
        """Yield the checkpoints of this run and layout, the best first."""
        assert self._store is not None
        store, own_name = self._store, self._owner.learner
        names = [name for name in tried(store.learners) or () if name != own_name]
        of_peers = [entry for name in names for entry in tried(partial(store.entries, name)) or ()]
        for entry in [*(tried(partial(store.entries, own_name)) or ()), *sorted(of_peers, reverse=True)]:
            checkpoint = tried(partial(store.read, entry))
            if checkpoint is None or checkpoint.run != self._owner.run or checkpoint.process == PROCESS:
                continue
            if checkpoint.layout != self._layout:
                problem = f"it is of {checkpoint.layout or ONE_DEVICE}, this learner has {self._layout or ONE_DEVICE}"
                log.warning("the checkpoint of step %d of %s does not fit: %s", entry.step, entry.learner, problem)
                continue
            yield entry, checkpoint

    # ------------------------------------------------------------------------------------------------------- training

    def batch_begins(self) -> float:
        """Take a checkpoint if one is due; return how long that took, in seconds.

        Raises:
            Exception: an error of the writing thread since the last call, other than of the store.
        """
        if self._error is not None:
            raise self._error
        if self._pending is not None:
            trainer_state.begin(self._trainer, self._pending.state, is_own=self._pending.is_own)
            self._pending = None
        is_after_step, self._is_after_step = self._is_after_step, False
        if not (is_after_step and self._is_due()):
            return 0.0
        began_s = time.perf_counter()
        self.take()
        return time.perf_counter() - began_s

    def is_due_after(self, num_steps: int) -> bool:
        """Return whether a checkpoint is due after so many more inner steps."""
        is_wanted = self._steps_since + num_steps >= self._every_steps or self._asked != self._answered
        return self._store is not None and is_wanted and self._written.is_set()

    def _is_due(self) -> bool:
        return self.is_due_after(0)

    def step_done(self) -> None:
        """Count an inner step."""
        self._steps_since += 1
        self._is_after_step = True  # no checkpoint between the batches of an accumulated step
        self.warm_up.step_done()

    def wait(self, within_s: float) -> bool:
        """Wait until the last checkpoint is written; return whether it is stored."""
        return self._written.wait(within_s) and self._is_stored

    def close(self) -> None:
        """End the threads after the present checkpoint is written, or after CLOSE_S; idempotent."""
        if not self._written.wait(CLOSE_S):
            log.warning("a checkpoint is still being written; this process does not wait for it")
        self._crew.stopping.set()
        if self._jobs is not None:
            self._jobs.stop()
        self._crew.join(CLOSE_S)

    def take(self) -> None:
        """Take a checkpoint now, between two batches."""
        if self._store is None:
            return
        state, sentences = trainer_state.take(self._trainer, self._callbacks_left_out)
        for sentence in sentences:
            log.warning("checkpoints do not hold all of it: %s", sentence)
        owner, step = self._owner, self._trainer.global_step
        self._answered = self._asked
        answer, layout = self._answered, self._layout
        checkpoint = Checkpoint(owner.run, owner.learner, owner.incarnation, PROCESS, step, state, answer, layout)
        self._steps_since, self._is_stored = 0, False
        self._written = written = threading.Event()
        if self._jobs is None:
            self._jobs = Jobs(self._crew, "checkpoints")
        self._jobs.put(lambda: self._write(checkpoint, written))

    def _write(self, checkpoint: Checkpoint, written: threading.Event) -> None:
        assert self._store is not None
        with self._telling():
            self._store.write(checkpoint)
            self._is_stored = True
        written.set()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Log each reason why a checkpoint was not written, once."""
        try:
            yield
        except (StorageError, UnstorableError) as error:
            if (reason := type(error).__name__ + str(error)) not in self._told:
                log.warning("no checkpoint was written, training goes on: %s", error)
            self._told.add(reason)

    def _watch_for_markers(self) -> None:
        """Look for markers of `diloco snapshot`."""
        assert self._store is not None
        while not self._crew.stopping.wait(LOOK_S if self._store.is_local else LOOK_FAR_S):
            with contextlib.suppress(StorageError):  # writing a checkpoint will log it
                self._asked = self._store.asked() or self._asked

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._written.set()


def tried(read: Callable[[], T]) -> T | None:
    """Return what `read` returns; if the store cannot be read, log it and return None."""
    try:
        return read()
    except StorageError as error:
        log.warning("%s", error)
        return None
