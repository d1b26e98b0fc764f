"""A syncer of one's own: started by the first learner of a run that nobody else has started.

1. It is a process group of its own, so that Ctrl-C in the learner's terminal does not take it down while others still
   use it. It yields cores that are short to training: nobody waits for it.
2. It ends by itself: soon after its last learner left, or a lease after that learner was killed.
3. If it ends before that, its starter starts it again, on the same run directory and at the same address: the run goes
   on where it was, bit for bit, and learners reconnect. Pauses between attempts grow, and there is no last one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lightning_diloco.errors import JoinError
from lightning_diloco.process.threads import yield_cores
from lightning_diloco.storage.files import make_directory
from lightning_diloco.transport.address import JoinAddress, read_join_file

log = logging.getLogger(__name__)

START_S = 60.0
END_S = 5.0
LOOK_S = 0.25
AGAIN_S, AGAIN_AT_MOST_S = 0.5, 60.0

_outliving: list[subprocess.Popen[bytes]] = []


class EmbeddedSyncer:
    """A syncer on loopback, as a child process; constructing it waits until it can be joined.

    Args:
        run_dir: a new RUN_DIR.

    Attributes:
        address: how to join it.
        run_dir: its RUN_DIR.

    Raises:
        JoinError: it did not come up; the end of its log is shown.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._log_path = run_dir / "syncer" / "log.txt"
        make_directory(self._log_path.parent)
        self._process = self._start()
        join, deadline_s = run_dir / "join", time.monotonic() + START_S
        try:
            while not join.exists():
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    tail = self._log_path.read_text(errors="replace")[-2000:]
                    raise JoinError(
                        f"the embedded syncer did not come up within {START_S:.0f} s; its log {self._log_path} ends:\n"
                        f"{tail}"
                    )
                time.sleep(0.05)
            self.address: JoinAddress = read_join_file(join)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "lightning_diloco.cli.main", "syncer"]
        argv += ["--run-dir", str(self.run_dir), "--embedded-by", str(os.getpid())]
        with open(self._log_path, "ab", opener=_private) as out:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=_environment()
            )
        yield_cores(process.pid)
        return process

    def watch(self, stopping: threading.Event, is_needed: Callable[[], bool]) -> None:
        """Start it again whenever it ends while it is needed; for a thread beside training.

        Args:
            stopping: ends this call.
            is_needed: whether its starter still takes part. Later it may end by itself, but not fail.
        """
        pause_s = AGAIN_S
        began_s = time.monotonic()
        while not stopping.wait(LOOK_S):
            code = self._process.poll()
            if code is None or (code == 0 and not is_needed()):
                continue
            if time.monotonic() - began_s > AGAIN_AT_MOST_S:
                pause_s = AGAIN_S
            log.warning(
                "the syncer of this run has ended (exit code %d) and is started again; training goes on; its log is %s",
                code, self._log_path,
            )  # fmt: skip
            if stopping.wait(pause_s):
                return
            self._process, began_s = self._start(), time.monotonic()
            pause_s = min(2 * pause_s, AGAIN_AT_MOST_S)

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self._process.poll() is not None

    def let_go(self, *, was_joined: bool, is_last: bool) -> None:
        """Its starter needs it no longer.

        Args:
            was_joined: the starter took part; otherwise nobody can need it.
            is_last: nobody else takes part, so it ends now; its summary is waited for.
        """
        if not was_joined:
            self._process.terminate()
        if is_last or not was_joined:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        if self._process.poll() is None:
            _outliving.append(self._process)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _environment() -> dict[str, str]:
    """One thread is what the merge is written for; learners need the cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
