"""A syncer of one's own: started by the first learner of a run that nobody else has started.

It is a process group of its own, so that Ctrl-C in the learner's terminal does not take it down while others still use
it. It ends by itself: soon after its last learner left, or a lease after that learner was killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from lightning_diloco.errors import JoinError
from lightning_diloco.transport.address import JoinAddress, read_join_file

START_S = 60.0


def start_embedded_syncer(run_dir: Path) -> JoinAddress:
    """Start a syncer on loopback and wait until it can be joined.

    Args:
        run_dir: a new RUN_DIR.

    Raises:
        JoinError: it did not come up; its log is shown.
    """
    log_path = run_dir / "syncer" / "log.txt"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "lightning_diloco.cli.main", "syncer"]
    argv += ["--run-dir", str(run_dir), "--embedded-by", str(os.getpid())]
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=_environment()
        )
    join = run_dir / "join"
    deadline_s = time.monotonic() + START_S
    while not join.exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            tail = log_path.read_text(errors="replace")[-2000:]
            raise JoinError(
                f"the embedded syncer did not come up within {START_S:.0f} s; its log {log_path} ends:\n{tail}"
            )
        time.sleep(0.05)
    return read_join_file(join)


def _environment() -> dict[str, str]:
    """One thread is what the merge is written for; learners need the cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
