"""Learners on unlike devices are one run: their anchors have the same bits, and the syncer weights them by tokens.

The stand-in needs a later torch than torch_xla 2.9. So learners on XLA (PJRT's CPU) come from another environment;
XLA_PYTHON names its Python.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from itertools import combinations, permutations
from statistics import fmean
from typing import Any

import pytest
from torch.utils import backend_registration

from lightning_diloco.syncer.replay import replay
from tests.devices.fake_tpu import make_chips
from tests.e2e.conftest import HERE, Processes
from tests.recorded_log import records

XLA_PYTHON = os.environ.get("XLA_PYTHON")
NUM_COMMITS = 100
APART = 8  # times as much work, which must give a larger share
NUM_ALIKE = 20  # versions that two learners must both have seen
LEARNERS: dict[str, tuple[int, tuple[object, ...]]] = {  # samples of one step of all ranks
    "accelerator": (4, ("--accelerator", "torch", "--batch-size", 4)),
    "bfloat16": (8, ("--accelerator", "cpu", "--precision", "bf16-true", "--batch-size", 8)),
    "two-ranks": (32, ("--accelerator", "cpu", "--devices", 2, "--batch-size", 16)),
    "two-chips": (16, ("--accelerator", "torch_tpu", "--devices", 2, "--batch-size", 8)),
    "xla": (8, ("--accelerator", "xla", "--batch-size", 8)),
    "xla-bfloat16": (16, ("--accelerator", "xla", "--precision", "bf16-true", "--batch-size", 16)),
}
WANTED = {
    "accelerator": ("late", "torch.float32"),
    "bfloat16": ("cpu", "torch.bfloat16"),
    "two-ranks": ("cpu", "torch.float32"),
    "two-chips": ("tpu", "torch.float32"),
    "xla": ("xla", "torch.float32"),
    "xla-bfloat16": ("xla", "torch.bfloat16"),
}
needs_stand_in = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no interface for back ends written in Python",
)
needs_xla = pytest.mark.skipif(XLA_PYTHON is None, reason="XLA_PYTHON names no Python with torch_xla")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fleet",
    [
        pytest.param(
            ("accelerator", "bfloat16", "two-ranks", "two-chips"),
            marks=(needs_stand_in, pytest.mark.thorough),
            id="stand-ins",
        ),
        pytest.param(
            ("accelerator", "bfloat16", "two-ranks", "xla", "xla-bfloat16"), marks=(needs_stand_in, needs_xla), id="xla"
        ),
    ],
)
def test_all_devices_have_the_same_anchors(processes: Processes, fleet: tuple[str, ...]) -> None:
    chips = make_chips(processes.root / "chips", 2)
    options = {"record_contributions": True, "waits_for_all": True}  # XLA compiles first
    syncer = processes.syncer(expect=len(fleet), quorum=len(fleet), **options)
    join = processes.address.join_string()
    running = []
    for name in fleet:
        (processes.root / name).mkdir()
        files = ("--out", processes.root / name / "held", "--until", processes.stop_file)
        env = {"DILOCO_JOIN": join, "DILOCO_LEARNER": name, "FAKE_CHIPS": str(chips), "PJRT_DEVICE": "CPU"}
        python = (XLA_PYTHON if name.startswith("xla") else None) or sys.executable
        arguments = (HERE / "mixed_learner.py", *LEARNERS[name][1], *files)
        running.append(processes.start(name, *arguments, python=python, **env))
    processes.until_commits(NUM_COMMITS)
    processes.stop_file.touch()
    assert [processes.end(process) for process in running] == [0] * len(fleet), processes.logs()
    syncer.terminate()
    assert processes.end(syncer) == 0

    held = {
        name: [json.loads(path.read_text()) for path in sorted((processes.root / name).glob("held.*.json"))]
        for name in fleet
    }
    assert {name: (ranks[0]["device"], ranks[0]["dtype"]) for name, ranks in held.items()} == {
        name: WANTED[name] for name in fleet
    }
    _check_anchors(held)
    summary = processes.summary()
    assert summary["ledger_exact"]
    trained = {learner["id"]: learner["tokens"] for learner in summary["learners"]}
    assert trained == {name: LEARNERS[name][0] * held[name][0]["steps"] for name in fleet}
    _check_weights(processes)


def _check_anchors(held: dict[str, list[dict[str, Any]]]) -> None:
    anchors = {name: ranks[0]["digests"] for name, ranks in held.items()}
    for one, other in combinations(anchors.values(), 2):
        both = one.keys() & other.keys()
        assert len(both) > NUM_ALIKE
        assert {key: one[key] for key in both} == {key: other[key] for key in both}
    for digests in anchors.values():
        assert len(set(digests.values())) == len(digests), "each version has values of its own"
    for first, *others in held.values():
        for other in others:
            assert set(first["digests"].values()) <= set(other["digests"])


def _check_weights(processes: Processes) -> None:
    """Check that merges have the weights of their records, and that more work by tokens has more weight."""
    found = replay(processes.run_dir)
    assert found.level == "merges"
    assert found.num_merges >= NUM_COMMITS
    _, log = records(processes.run_dir)
    names = {record["session"]: record["learner"] for record in log if record["kind"] == "Granted"}
    commits = [record for record in log if record["kind"] == "CommitRecord"]
    shares, work = defaultdict[str, list[float]](list), defaultdict[str, int](int)
    for commit in commits[len(commits) // 2 :]:  # by then, the rates of all learners are known
        for merge in commit["merges"]:
            name, ready = names[merge["session"]], merge["ready"]
            shares[name].append(merge["share"])
            work[name] += (ready["stop"] - ready["start"]) * LEARNERS[name][0]  # tokens * tokens / steps
    apart = [(one, other) for one, other in permutations(work, 2) if work[one] > APART * work[other]]
    assert apart
    assert [(one, other) for one, other in apart if fmean(shares[one]) <= fmean(shares[other])] == []
