"""A learner's checkpoints, from which a process that comes after it goes on.

1. Every N inner steps the training thread copies the Trainer's state; a thread beside writes it. While one is being
   written, none is taken: a slow store makes them rarer, never training slower. A store that fails is told of, once for
   each reason, and training goes on.
2. Parameters are never among it: they come from the run's anchors, so that nothing is counted twice, and who comes back
   never tells the run what is true.
3. A new process takes its learner's newest checkpoint. If there is none that fits, the newest of a peer, without what
   is the peer's own (`trainer_state.py`). If there is none either, it begins with a warm-up (`lr_warmup.py`) and with
   schedules at the run's position (`strategy/trainer/lr_schedules.py`), unless the run begins with it.
4. What is damaged or does not fit is passed over, and said. A user's own `ckpt_path` wins over all of it.
5. Who wants a snapshot of the whole run leaves a marker in the store; the next boundary answers it with a checkpoint.
6. A process never goes on from what it wrote itself: a second fit of one script is a new one.
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
    """Whose checkpoints these are: run id, learner id and its present incarnation."""

    run: str
    learner: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, or a rank's part of it, to which there is no objection."""

    learner: str
    step: int
    state: State
    is_own: bool


class LearnerCheckpointer:
    """The checkpoints of one fit; its methods are called by the training thread.

    Args:
        trainer: about to train.
        owner: whose they are.
        store: where they lie; None: none are read or written.
        every_steps: N, inner steps between two of them.
        layout: how several ranks hold the model; None: one device does.

    Attributes:
        warm_up: what the optimizer goes through first.
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

    # ---------------------------------------------------------------------------------------------------- coming back

    def heal(self, *, warm_up_steps: int = 0, run_steps: int = 0) -> None:
        """Go on from a checkpoint, if there is one and the user named none.

        Args:
            warm_up_steps: of the optimizer, if there is none; 0 where the run begins with this learner.
            run_steps: where its schedules by steps begin, if there is none.
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
        """(epoch, batches of it that were trained with) where this fit begins."""
        return self._begins or START

    def data_is_ready(self, *, is_at_position: bool) -> None:
        """The training data was loaded, and begins at `position` or not."""
        if self._begins and is_at_position:
            # Lightning cannot know it, and warns of the opposite.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
        elif self._begins:
            log.warning("where its training data goes on is the datamodule's to know; else its epoch begins anew")

    def _find(self) -> Found | None:
        """The best that this Trainer can go on from."""
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
        """What is there, of this run and layout, the best first."""
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
        """Take a checkpoint if one is due; returns how long that took, in seconds.

        Raises:
            Exception: what the writing thread met since the last call, other than a store that failed.
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
        """Whether one is to be taken when so many more inner steps are done."""
        is_wanted = self._steps_since + num_steps >= self._every_steps or self._asked != self._answered
        return self._store is not None and is_wanted and self._written.is_set()

    def _is_due(self) -> bool:
        return self.is_due_after(0)

    def step_done(self) -> None:
        """An inner step is done."""
        self._steps_since += 1
        self._is_after_step = True  # between two batches whose gradients are added up there is nothing to take
        self.warm_up.step_done()

    def wait(self, within_s: float) -> bool:
        """Wait for what was taken last; whether the store has it."""
        return self._written.wait(within_s) and self._is_stored

    def close(self) -> None:
        """Let go, after the one being written; idempotent."""
        if not self._written.wait(CLOSE_S):
            log.warning("a checkpoint is still being written, and left alone")
        self._crew.stopping.set()
        if self._jobs is not None:
            self._jobs.stop()
        self._crew.join(CLOSE_S)

    def take(self) -> None:
        """Take one now, between two batches."""
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
        """Say, once for each reason, that nothing was written."""
        try:
            yield
        except (StorageError, UnstorableError) as error:
            if (reason := type(error).__name__ + str(error)) not in self._told:
                log.warning("no checkpoint was written, training goes on: %s", error)
            self._told.add(reason)

    def _watch_for_markers(self) -> None:
        """Look for somebody who wants a snapshot of the whole run."""
        assert self._store is not None
        while not self._crew.stopping.wait(LOOK_S if self._store.is_local else LOOK_FAR_S):
            with contextlib.suppress(StorageError):  # writing will tell
                self._asked = self._store.asked() or self._asked

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._written.set()


def tried(read: Callable[[], T]) -> T | None:
    """What the store has; None if it cannot be read, and why is said."""
    try:
        return read()
    except StorageError as error:
        log.warning("%s", error)
        return None
