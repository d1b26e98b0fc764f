"""A clone of the checkout in which a shell runs documented command lines.

1. A line runs to its end, or in the background, once its output has the awaited text.
2. Background lines end in the order in which they were started: by a signal, or by themselves.
3. Nothing is downloaded, and there are no logins; home and caches are folders of the clone.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.docs.commands import ROOT

WITHIN_S = 900.0
CLONED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", ".ci", "lightning_diloco")
_TICK_S = 0.05
_KEPT_OUT = re.compile(r"^(DILOCO|WANDB|PYTEST|HF|COV)_")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line.

    Args:
        line: the line that bash runs.
        of: the documented commands that it represents, with placeholders filled in and small numbers.
        says: a pattern in its output; the next line waits for the pattern of a background line.
        leaves: patterns of paths below the clone that must exist afterwards.
        beside: it runs in the background, and ends by this signal, or by itself (0); None: it ends before the next
            line.
        ends_others: all background lines are ended before it begins.
        exits: its expected exit code.
    """

    line: str
    of: tuple[str, ...] = ()
    says: str = ""
    leaves: tuple[str, ...] = ()
    beside: int | None = None
    ends_others: bool = False
    exits: int = 0


class Clone:
    """A folder with the content of a clone, and the processes that were started in it.

    Args:
        root: folder that becomes the clone.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._beside: list[tuple[Step, subprocess.Popen[bytes], Path]] = []
        self._num_lines = 0
        for name in (*CLONED, "recipes", "tests"):
            source, to = ROOT / name, root / name
            ignored = shutil.ignore_patterns("__pycache__", "runs", "lightning_logs", ".*_cache")
            shutil.copytree(source, to, ignore=ignored) if source.is_dir() else shutil.copyfile(source, to)
        shutil.copymode(ROOT / ".ci" / "run", root / ".ci" / "run")
        (root / "home").mkdir()
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; children inherit it
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def run(self, step: Step) -> str:
        """Run a line; return its output."""
        if step.ends_others:
            self.end()
        log = self.root / "home" / f"{self._num_lines}.log"
        self._num_lines += 1
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", step.line],
                cwd=self.root,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._beside.append((step, process, log))
        if step.beside is None:
            self._end_last()
        self._await_what_it_leaves(step, process, log)
        return log.read_text()

    def _await_what_it_leaves(self, step: Step, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        told = f"{step.line}\ndoes not say {step.says!r} or leave {step.leaves}\n"
        while True:
            is_over = process.poll() is not None
            says = re.search(step.says, log.read_text()) is not None
            if says and all(any(self.root.glob(pattern)) for pattern in step.leaves):
                return
            # An embedded syncer writes its summary after the learner has ended.
            assert says or not is_over, told + log.read_text()
            assert time.monotonic() < deadline_s, told + log.read_text()
            time.sleep(_TICK_S)

    def end(self) -> None:
        """End background lines, and check their exit codes."""
        self._beside.reverse()
        while self._beside:
            self._end_last()

    def _end_last(self) -> None:
        step, process, log = self._beside[-1]
        if step.beside:
            os.killpg(process.pid, step.beside)
        try:
            exit_code = process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{step.line}\ndoes not end\n{log.read_text()}") from None
        self._beside.pop()
        assert exit_code == step.exits, f"{step.line}\nexit code {exit_code}\n{log.read_text()}"

    def kill(self) -> None:
        """Kill all remaining processes; learners end with their parents."""
        for _, process, _ in self._beside:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._beside.clear()

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not _KEPT_OUT.match(name)}
        home = str(self.root / "home")
        return {
            **kept,
            "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
            "PYTHONPATH": str(self.root),
            "HOME": home,
            "XDG_CACHE_HOME": f"{home}/cache",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
        }
