"""A syncer of one's own: started by the first learner of a run that nobody else has started.

It is a process group of its own, so that Ctrl-C in the learner's terminal does not take it down while others still use
it. It ends by itself: soon after its last learner left, or a lease after that learner was killed. It yields cores that
are short to training: nobody waits for it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from lightning_diloco.errors import JoinError
from lightning_diloco.runtime.threads import yield_cores
from lightning_diloco.transport.address import JoinAddress, read_join_file

START_S = 60.0
END_S = 5.0

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
        log_path = run_dir / "syncer" / "log.txt"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "lightning_diloco.cli.main", "syncer"]
        argv += ["--run-dir", str(run_dir), "--embedded-by", str(os.getpid())]
        with open(log_path, "ab", opener=_private) as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=_environment()
            )
        yield_cores(self._process.pid)
        join, deadline_s = run_dir / "join", time.monotonic() + START_S
        try:
            while not join.exists():
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    tail = log_path.read_text(errors="replace")[-2000:]
                    raise JoinError(
                        f"the embedded syncer did not come up within {START_S:.0f} s; its log {log_path} ends:\n{tail}"
                    )
                time.sleep(0.05)
            self.address: JoinAddress = read_join_file(join)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

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
    return os.open(path, flags, 0o600)


def _environment() -> dict[str, str]:
    """One thread is what the merge is written for; learners need the cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
