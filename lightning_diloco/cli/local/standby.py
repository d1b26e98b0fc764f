"""A syncer kept ready to take over: `python -m lightning_diloco.cli.local.standby MODULE WORDS...`.

1. Nearly all of a syncer's start are its imports. They are done here ahead of need; nothing of the run is touched.
2. A line on stdin: go on as `python -m MODULE WORDS...`. The end of stdin: nobody needs this process any more.

Source: our choice.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module

from lightning_diloco.cli.local.collector import kept


def argv(command: tuple[str, ...]) -> tuple[str, ...]:
    """What to start instead of `PYTHON -m MODULE WORDS...`, ahead of need; empty for any other command."""
    python, *words = command
    return (python, "-m", __name__, *words[1:]) if words[:1] == ["-m"] else ()


def main() -> None:
    """Import, wait, go on."""
    with kept():
        import_module("lightning_diloco.syncer.process")
    if sys.stdin.readline():
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
