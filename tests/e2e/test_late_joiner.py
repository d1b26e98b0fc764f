"""A process joins a real run late: its schedule by steps begins at the run's position.

The first learner trains until a file appears, so that the run continues while the late learner starts and drains. The
test waits for lines of the tape and for exit codes only.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from lightning_diloco.storage.tape import read_tape
from tests.e2e.conftest import HERE, Processes, until

SYNC_EVERY, OWN_STEPS, HAS_COME_TO = 4, 40, 3

pytestmark = pytest.mark.slow


def tape(processes: Processes) -> list[dict[str, Any]]:
    path = processes.run_dir / "tape" / "events.jsonl"
    return list(read_tape(path)) if path.exists() else []


def furthest(lines: list[dict[str, Any]]) -> int:
    """Return the inner steps of the run after these lines of the tape."""
    return SYNC_EVERY * max((line["version"] for line in lines if line["event"] == "commit"), default=0)


def start(processes: Processes, name: str, *arguments: object) -> subprocess.Popen[bytes]:
    out = ("--out", processes.root / f"{name}.json")
    join = processes.address.join_string()
    script = HERE / "scheduled.py"
    return processes.start(name, "-W", "ignore", script, *out, *arguments, DILOCO_JOIN=join, DILOCO_LEARNER=name)


def test_schedule_of_a_late_process_begins_at_the_runs_position(processes: Processes) -> None:
    processes.syncer(sync_every=SYNC_EVERY, num_fragments=2, overlap=1)
    first = start(processes, "first", "--stop-file", processes.stop_file)
    wanted = HAS_COME_TO * SYNC_EVERY
    until(lambda: first.poll() is not None or furthest(tape(processes)) >= wanted, "commits", processes)
    assert first.poll() is None, processes.logs()
    late = start(processes, "late", "--steps", OWN_STEPS)
    assert processes.end(late) == 0
    processes.stop_file.touch()
    assert processes.end(first) == 0

    lines = tape(processes)
    joined = next(k for k, line in enumerate(lines) if line["event"] == "join" and line["learner"] == "late")
    took_part = next(k for k, line in enumerate(lines) if line["event"] == "commit" and "late" in line["learners"])
    rates = json.loads((processes.root / "late.json").read_text())
    # It adopts announced versions a moment after they are on the tape; meanwhile the run may advance.
    assert wanted <= furthest(lines[:joined]) <= round(rates[0]) + SYNC_EVERY
    assert wanted <= round(rates[0]) <= furthest(lines[:took_part])
    assert rates == pytest.approx([rates[0] + k for k in range(OWN_STEPS)])
    assert json.loads((processes.root / "first.json").read_text())[:OWN_STEPS] == pytest.approx(range(OWN_STEPS))
    assert (
        f"schedules by steps begin at step {round(rates[0])}, where the run is"
        in (processes.root / "late.log").read_text()
    )
