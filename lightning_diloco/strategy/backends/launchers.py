"""How the processes of a learner with several of them start, and how all of them end when one does.

1. They start as Lightning starts them, after the paths of the learner were separated.
2. Whoever meets an error ends with exit code 1 and says what it was. The others lose their connection to it in the
   midst of what they compute; they end likewise, and say that another rank has ended.
3. The process that started the others ends with code 1, too, when one of them has failed and it cannot notice that
   itself, because it waits for something else.
4. Where there was nothing to do, because the run is over, all end with code 0.
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
from lightning_diloco.process.exit import hard_exit
from lightning_diloco.strategy.data.hooks import wants_link
from lightning_diloco.strategy.identity import note_last_step
from lightning_diloco.strategy.trainer.preemption import EXIT_CODE

log = logging.getLogger(__name__)

WATCH_S = 0.5
PATIENCE_S = 20.0
_GLOO = "gloo/"  # in what it raises there is a path of its sources
_NOTHING_TO_DO = "nothing to do"


class Scripts(_SubprocessScriptLauncher):
    """Starts the script once more for each rank, unless somebody else does."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """See Lightning's, which would kill this process soon after another one has failed, whatever it is doing."""
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
    """Starts a function in a process for each rank.

    This process has no rank: it passes SIGTERM on, and ends as its ranks do.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """See Lightning's."""
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
        if trainer is not None and wants_link(trainer):
            note_last_step(self._strategy._learner)  # type: ignore[attr-defined]
        return found


def _handled(function: Callable[..., Any], trainer: pl.Trainer | None, *args: Any, **kwargs: Any) -> Any:
    """What a rank raises, Lightning handles only in the process that started it; it has to be handled in its own."""
    try:
        return _explained(function, *args, **kwargs)
    except BaseException as error:
        if trainer is not None:
            _interrupt(trainer, error)
        code = error.code if isinstance(error, SystemExit) else 1
        if not code:
            return _NOTHING_TO_DO  # who started this process waits for a result, unless it ends with another code
        hard_exit(code if isinstance(code, int) else 1)
        raise


def _explained(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What gloo raises where a peer has ended says nothing to people."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if _GLOO not in str(error):
            raise
        found = str(error).partition("] ")[2].partition(". ")[0]  # between the path and what gloo guesses
        raise DiLoCoError(
            f"another rank of this learner has ended, or does not answer ({found}); its own output says why; start the "
            "learner again"
        ) from None


def _watch(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended well, or one has not: then this process ends, by itself if it can."""
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
    """Processes that are started meanwhile find this learner id in their environment."""
    before = os.environ.get("DILOCO_LEARNER")
    if learner is not None:
        os.environ["DILOCO_LEARNER"] = learner
    try:
        yield
    finally:
        if learner is not None and before is None:
            del os.environ["DILOCO_LEARNER"]
