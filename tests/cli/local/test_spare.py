"""A spare syncer process becomes the syncer on request, and exits when it is no longer needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_diloco.cli.local import spare


def test_only_a_module_can_have_a_spare() -> None:
    words = (sys.executable, "-m", "a.module", "--option", "1")
    assert spare.argv(words) == (sys.executable, "-m", "lightning_diloco.cli.local.spare", *words[2:])
    assert spare.argv((sys.executable, "script.py")) == ()


@pytest.mark.slow
@pytest.mark.parametrize(("told", "says"), [("\n", "usage: diloco syncer"), ("", "")])
def test_a_spare_continues_as_the_module_on_request(told: str, says: str) -> None:
    argv = spare.argv((sys.executable, "-m", "lightning_diloco.cli.main", "syncer", "--help"))
    ended = subprocess.run(argv, input=told, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout[: len(says) or None] == says
