"""One exchange is followed through the functions that CONTRIBUTING.md names, in that order."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import pytest

import lightning_diloco
from tests.learner.fleet import Fleet

ROOT = Path(lightning_diloco.__file__).parent
PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
STAGES = re.findall(r"^\| \d+ \|.*\| `([\w/]+\.py)` \| `([\w.]+)` \|$", PAGE, re.MULTILINE)
OPTIONS = {"sync_every": 8, "num_fragments": 1, "overlap": 1, "block_size": 16, "lease_s": 30.0}
MAX_FILES, MAX_STAGES = 32, 100

Entered = tuple[str, str]


class Recorder:
    """Records the functions of this package that are entered, in order, in all threads that start meanwhile."""

    def __init__(self) -> None:
        self.entered: list[Entered] = []
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            where = Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()
            self.entered.append((where, frame.f_code.co_name))


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Entered]]:
    """Return the functions entered in one exchange, from the learner's request after a step to the landing."""
    recorder = Recorder()
    threading.setprofile(recorder)
    try:
        with Fleet(tmp_path_factory.mktemp("run"), run_options=OPTIONS) as fleet:
            sys.setprofile(recorder)
            learner = fleet.learner("l0").join()
            while learner.landed[0] < 1:
                learner.step()
            recorder.is_on = True
            while learner.landed[0] < 8:
                learner.step()
            recorder.is_on = False
            sys.setprofile(None)
            yield one_exchange(recorder.entered)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def one_exchange(entered: list[Entered]) -> list[Entered]:
    """Return the first exchange that was recorded completely and whose round the learner requested.

    A late message of the exchange before it may open the round. That exchange may also land after this one has begun.
    """
    first, *_, last = stages()
    announces = [at for at, stage in enumerate(entered) if stage == ("protocol/syncer/rounds.py", "_announce")]
    snapshots = [at for at, stage in enumerate(entered) if stage == ("devices/dense.py", "snapshot")]
    asks = next(
        at
        for at, stage in enumerate(entered)
        if stage == ("protocol/learner/machine.py", "_intent") and _next(announces, at) < _next(snapshots, at)
    )
    begins = max(at for at, stage in enumerate(entered[:asks]) if stage == first)
    installed = entered.index(("syncer/anchors.py", "install"), _next(snapshots, asks))
    fetched = entered.index(("learner/exchange.py", "_fetch"), installed)
    return entered[begins : entered.index(last, fetched) + 1]


def _next(places: Sequence[int], at: int) -> int:
    return next(place for place in places if place > at)


def first_missing(stages: Sequence[Entered], entered: Sequence[Entered]) -> Entered | None:
    """Return the first stage that is not entered after the one before it."""
    left = iter(entered)
    return next((stage for stage in stages if stage not in left), None)


def stages() -> list[Entered]:
    return [(where, function.rpartition(".")[2]) for where, function in STAGES]


def test_an_exchange_has_the_documented_stages(entered: list[Entered]) -> None:
    assert first_missing(stages(), entered) is None


def test_the_number_of_stages_is_small(entered: list[Entered]) -> None:
    assert 30 <= len(STAGES) <= MAX_STAGES
    assert len({where for where, _ in STAGES}) <= MAX_FILES


@pytest.mark.parametrize("k", [8, 12, 21, 26])
def test_stages_in_another_order_are_detected(entered: list[Entered], k: int) -> None:
    swapped = stages()
    swapped[k], swapped[k + 1] = swapped[k + 1], swapped[k]
    assert first_missing(swapped, entered) is not None


def test_every_documented_function_is_in_its_file() -> None:
    for where, function in STAGES:
        *classes, name = function.split(".")
        source = (ROOT / where).read_text(encoding="utf-8")
        assert all(f"class {each}" in source for each in classes), f"{where}: {function}"
        assert f"def {name}(" in source, f"{where}: {function}"
