"""Groups of several ranks are destroyed before the interpreter ends; otherwise gloo's threads may abort the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import atexit, os, tempfile
import torch.distributed as dist
from lightning_diloco.learner.ranks.group import Ranks

atexit.register(lambda: print("at the end:", dist.is_initialized()))  # what was registered first runs last
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
for _ in range(2):  # a script may fit twice
    ranks = Ranks()
    ranks.begin([3])
    assert ranks.end() == [3]
    {end}
"""


@pytest.mark.parametrize(("end", "initialized"), [("ranks.close()", False), ("pass", True)])
def test_groups_are_destroyed_before_the_interpreter_ends(end: str, initialized: bool) -> None:
    script = SCRIPT.replace("{end}", end)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert f"at the end: {initialized}" in found.stdout, found.stderr
