"""Shows this package's warnings from the learners' logs on the display of the run, each once.

A warning is a line in the format of Python's `warnings` or Lightning's `rank_zero_warn`, from a file of this package.
Warnings that differ only in numbers count as the same. Source: our choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from lightning_diloco.storage.files import whole_lines

_OURS = re.compile(r"\S*lightning_diloco/\S+\.py:\d+: (?:\w*Warning: )?(.+)")
_NUMBER = re.compile(r"\d+")


class Echo:
    """Reads the lines appended to logs after its creation.

    Args:
        logs: paths by learner; the files need not exist yet.
        say: called with each warning.
    """

    def __init__(self, logs: Mapping[str, Path], say: Callable[[str], None]) -> None:
        self._logs = dict(logs)
        self._say = say
        self._read_bytes = {name: log.stat().st_size if log.exists() else 0 for name, log in logs.items()}
        self._said: set[str] = set()

    def follow(self, name: str, log: Path) -> None:
        """Read this log of a learner, too, from its beginning."""
        if name not in self._logs:
            self._logs[name], self._read_bytes[name] = log, 0

    def look(self) -> None:
        """Report new warnings, without blocking."""
        for name, log in self._logs.items():
            for text in map(_OURS.fullmatch, self._new_lines(name, log)):
                if text is not None and (kind := _NUMBER.sub("N", text[1])) not in self._said:
                    self._said.add(kind)
                    self._say(f"{name} warns: {text[1]}")

    def _new_lines(self, name: str, log: Path) -> list[str]:
        """Return complete new lines; an incomplete line is read again later."""
        if not log.exists() or log.stat().st_size <= self._read_bytes[name]:
            return []
        whole = b"".join(whole_lines(log, self._read_bytes[name]))
        self._read_bytes[name] += len(whole)
        # A progress bar redraws its line after "\r".
        return [line.rpartition("\r")[2] for line in whole.decode(errors="replace").replace("\r\n", "\n").split("\n")]
