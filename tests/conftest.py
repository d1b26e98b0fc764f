"""Settings of all tests: no network, few threads, equal random numbers, and no run from the user's environment."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.e2e.conftest import Processes

# Libraries read these once, when they are first imported, and child processes inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidiactl").exists():  # asked without torch, whose import takes seconds
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU, kernels are tested in an interpreter
for name in [name for name in os.environ if name.startswith("DILOCO_")]:
    del os.environ[name]

# Equal examples on every machine, no time limits, and no example database.
settings.register_profile("suite", derandomize=True, deadline=None, database=None)
settings.load_profile("suite")


gc.disable()


def pytest_collection_finish() -> None:
    """Exempt objects that are imported by now from garbage collection, because they stay anyway."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start each test from the same random state, without importing libraries for it (torch takes 2 s).

    For unused devices, torch would record the seed and the stack, which takes milliseconds.
    """
    random.seed(0)
    if torch := sys.modules.get("torch"):
        (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """A syncer and learners as processes; none of them outlives the test."""
    from tests.e2e.conftest import Processes  # transport libraries, needed only here

    made = Processes(tmp_path)
    yield made
    made.kill_all()
