"""A spare process of the syncer: `python -m lightning_diloco.cli.local.spare MODULE WORDS...`.

1. Imports take nearly all of a syncer's start-up time, so the spare imports in advance. It does not touch the run.
2. A line on stdin makes the process continue as `python -m MODULE WORDS...`. The end of stdin makes it exit.

Source: our choice.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module

from lightning_diloco.cli.local.collector import kept


def argv(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that starts a spare of `PYTHON -m MODULE WORDS...`; empty for any other command."""
    python, *words = command
    return (python, "-m", __name__, *words[1:]) if words[:1] == ["-m"] else ()


def main() -> None:
    """Import, wait for a line, and continue as the syncer."""
    with kept():
        import_module("lightning_diloco.syncer.process")
    if sys.stdin.readline():
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
