"""Fragments on an accelerator that runs everything as late as it may: order, waits and bits (`late.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch has no interface for back ends written in Python",
    ),
]


@pytest.fixture(scope="module")
def found():
    """Return the results of all cases, from a new process."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.devices.late_checks"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_anchors_are_those_of_the_cpu(found):
    assert set(found["equals the CPU"].values()) == {"equal"}


def test_anchors_differ_without_events(found):
    alike = found["control: no events"]
    assert [alike[f"torch.{dtype}, carry"] for dtype in ("float32", "bfloat16", "float64")] == ["AssertionError"] * 3


def test_a_device_with_one_queue_needs_no_streams(found):
    assert set(found["one queue"].values()) == {"equal"}


def test_a_device_without_float64_needs_none(found):
    alike = found["without float64"]
    assert {how for name, how in alike.items() if "float64" not in name} == {"equal"}
    assert {how for name, how in alike.items() if "float64" in name} == {"TypeError"}, "parameters of that type"


def test_a_device_is_asked_for_side_streams(found):
    assert found["side streams"].pop("late")
    assert len(found["side streams"]) == 5
    assert not any(found["side streams"].values()), "streams that are missing or do nothing"


def test_a_warning_says_once_what_a_device_lacks(found):
    queue, memory = found["says"]["said"]
    assert queue == "devices of type late have one queue here: exchanges run in order with training and delay it"
    assert memory.startswith("host memory cannot be pinned for late (")
    assert memory.endswith("): copies from and to the device block")


def test_a_buffer_is_written_after_the_landing_that_reads_it(found):
    assert found["recycled"] == {"equal": True}
    assert found["control: a recycled buffer is taken at once"] == {"equal": False}


def test_a_snapshot_gets_no_buffer_that_is_used_beside_training(found):
    assert found["in use"] == {"equal": True}
    assert found["control: a buffer is recycled while it is used"] == {"equal": False}


def test_work_beside_training_begins_after_what_it_reads(found):
    assert found["beside"] == {"read": 1.0}
    assert found["control: work begins at once"] == {"read": 0.0}


def test_the_training_thread_never_waits(found):
    assert found["waits"] == {"training": [], "nothing had run": True, "link": ["link"]}


def test_a_contribution_is_complete_when_it_is_returned(found):
    assert found["payload"] == found["payload in one queue"] == {"complete": True}
    assert found["control: the payload is not waited for"] == {"complete": False}
    assert found["control: the payload of one queue is not waited for"] == {"complete": False}


def test_a_loss_is_read_before_training_changes_it(found):
    assert found["loss"] == found["loss in one queue"] == {"read": 3.0, "training": []}


def test_a_device_with_other_sums_is_refused(found):
    assert found["other arithmetic"]["error"].startswith("256 of 256 sums differ on late from those of the CPU")


@pytest.mark.parametrize("fit", ["fit", "fit without float64"])
def test_a_trainer_trains_on_it(found, fit):
    assert found[fit]["weight"] == pytest.approx([1, 2, 3, 4], rel=0.2)
    assert "diloco-worker" in found[fit]["other threads"], "contributions were encoded beside training"
    assert found[fit]["waits in steps"] == 0, "no hook waits for the device, at snapshots, landings or losses"
