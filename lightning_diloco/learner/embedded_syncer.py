"""The embedded syncer, which a learner starts if it was not given a run to join.

1. It has its own process group, so Ctrl-C in the learner's terminal does not end it while other learners use it. It
   runs at low priority, to leave the cores to training.
2. It ends by itself soon after its last learner has left, or `lease_s` after that learner was killed.
3. If it ends earlier, the learner that started it restarts it with the same run directory and address. The run
   continues bit for bit, and learners reconnect. The number of restarts is not limited; pauses between them grow up to
   AGAIN_AT_MOST_S.
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
    """A syncer on loopback in a child process. The constructor waits until learners can join.

    Args:
        run_dir: a new RUN_DIR.

    Attributes:
        address: join address of the syncer.
        run_dir: RUN_DIR of the syncer.

    Raises:
        JoinError: the syncer did not start; the message has the end of its log.
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
                        f"the embedded syncer did not start within {START_S:.0f} s; its log {self._log_path} ends:\n"
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
        """Restart the syncer whenever it ends too early. Runs in its own thread.

        Args:
            stopping: ends this call.
            is_needed: returns whether the starter still takes part. If it does not, the syncer is restarted only after
                a failure.
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

    def let_go(self, *, was_joined: bool, is_last: bool) -> bool:
        """Release the syncer when its starter no longer needs it; returns whether it has ended.

        Args:
            was_joined: the starter took part. If it did not, the syncer is terminated.
            is_last: no other learner takes part. This call then waits for the syncer to end and write its summary.
        """
        if not was_joined:
            self._process.terminate()
        if is_last or not was_joined:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        if self._process.poll() is not None:
            return True
        _outliving.append(self._process)
        return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _environment() -> dict[str, str]:
    """Return the environment of the syncer, with one thread for the merge, because learners need the cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
