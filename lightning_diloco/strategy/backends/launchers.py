"""Launchers of a learner with several processes: they start the ranks, and end all ranks if one fails.

1. The processes start as with Lightning's launchers, after the learner's paths are separated (trainer/paths.py).
2. A rank that fails reports its error and ends with exit code 1. The other ranks lose their connection to it while they
   compute. They also end with exit code 1, and report that another rank has ended.
3. If a rank fails, the process that started the ranks also ends with code 1, even if it waits for something else and
   cannot notice the failure.
4. If there is nothing to do because the run is over, all processes end with code 0.
5. If the run was left before all work was merged, rank 0, or the process that started all ranks, ends with code 1.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.multiprocessing import ProcessExitedException

from lightning_diloco.errors import DiLoCoError
from lightning_diloco.process.exit import fail_at_exit, hard_exit, take_back_failure
from lightning_diloco.strategy.data.hooks import wants_link
from lightning_diloco.strategy.identity import note_last_step
from lightning_diloco.strategy.trainer.preemption import EXIT_CODE

log = logging.getLogger(__name__)

WATCH_S = 0.5
PATIENCE_S = 20.0
_GLOO = "gloo/"  # gloo's error messages contain a path of its sources
_NOTHING_TO_DO = "nothing to do"
_WORK_WAS_LOST = "work was lost: "


class Scripts(_SubprocessScriptLauncher):
    """Starts the script once for each other rank, unless the cluster environment does."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """See Lightning's `launch`.

        `_watch` replaces Lightning's observer, which would kill this process soon after another one has failed.
        """
        if trainer is not None:
            self._strategy._separate_paths(trainer)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            with _handed_on(self._strategy._learner.learner):
                self._call_children_scripts()
            threading.Thread(target=_watch, args=(self.procs,), name="diloco-ranks", daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return _explained(function, *args, **kwargs)


class Processes(_MultiProcessingLauncher):
    """Runs a function in a new process for each rank.

    The launching process has no rank. It passes SIGTERM on to the ranks, and ends as they do.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """See Lightning's `launch`."""
        if trainer is not None:
            self._strategy._separate_paths(trainer)  # type: ignore[attr-defined]
        before = signal.getsignal(signal.SIGTERM)
        _SignalConnector._register_signal(signal.SIGTERM, lambda signum, _: self.kill(signum))
        try:
            found = super().launch(partial(_handled, function, trainer), *args, trainer=trainer, **kwargs)
        except ProcessExitedException as error:
            if error.exit_code == EXIT_CODE:
                raise SystemExit(EXIT_CODE) from error
            raise
        finally:
            _SignalConnector._register_signal(signal.SIGTERM, before)
        if found == _NOTHING_TO_DO:
            raise SystemExit(0)
        if isinstance(found, str) and found.startswith(_WORK_WAS_LOST):
            fail_at_exit(found.removeprefix(_WORK_WAS_LOST))
            found = None
        if trainer is not None and wants_link(trainer):
            note_last_step(self._strategy._learner)  # type: ignore[attr-defined]
        return found


def _handled(function: Callable[..., Any], trainer: pl.Trainer | None, *args: Any, **kwargs: Any) -> Any:
    """Call the function and handle its exception in this rank; Lightning handles it in the launching process only."""
    try:
        found = _explained(function, *args, **kwargs)
        # The launching process fails by itself then. A nonzero exit code of this process would make it raise an error.
        return found if (reason := take_back_failure()) is None else _WORK_WAS_LOST + reason
    except BaseException as error:
        if trainer is not None:
            _interrupt(trainer, error)
        code = error.code if isinstance(error, SystemExit) else 1
        if not code:
            return _NOTHING_TO_DO  # the launching process waits for a result if the exit code is 0
        hard_exit(code if isinstance(code, int) else 1)
        raise


def _explained(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function, and replace gloo's error about a rank that has ended by a clear one.

    Raises:
        DiLoCoError: another rank has ended or does not answer.
    """
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if _GLOO not in str(error):
            raise
        found = str(error).partition("] ")[2].partition(". ")[0]  # the text between the path and gloo's guesses
        raise DiLoCoError(
            f"another rank of this learner has ended, or does not answer ({found}); its own output says why; start the "
            "learner again"
        ) from None


def _watch(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when all ranks have ended with code 0; if one fails, end this process and the other ranks.

    This process has PATIENCE_S to end by itself first.
    """
    while not any(rank.poll() for rank in ranks):
        if all(rank.returncode == 0 for rank in ranks):
            return
        time.sleep(WATCH_S)
    time.sleep(PATIENCE_S)
    codes = {rank.pid: rank.returncode for rank in ranks if rank.returncode}
    log.error("ranks of this learner have ended (exit codes by process: %s), and this one with them", codes)
    for rank in ranks:
        rank.kill()
    os._exit(1)


@contextmanager
def _handed_on(learner: str | None) -> Iterator[None]:
    """Set DILOCO_LEARNER to this learner id for the processes that are started meanwhile."""
    before = os.environ.get("DILOCO_LEARNER")
    if learner is not None:
        os.environ["DILOCO_LEARNER"] = learner
    try:
        yield
    finally:
        if learner is not None and before is None:
            del os.environ["DILOCO_LEARNER"]
