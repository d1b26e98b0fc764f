"""One run of an accelerator, a CPU in bfloat16, two ranks on CPUs, and two chips: their anchors have the same bits."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from torch.utils import backend_registration

from tests.devices.fake_tpu import make_chips
from tests.e2e.conftest import HERE, Processes

LEARNERS = {  # samples of one step of all ranks
    "accelerator": (4, ("--accelerator", "torch", "--batch-size", 4)),
    "bfloat16": (8, ("--accelerator", "cpu", "--precision", "bf16-true", "--batch-size", 8)),
    "two-ranks": (32, ("--accelerator", "cpu", "--devices", 2, "--batch-size", 16)),
    "two-chips": (16, ("--accelerator", "torch_tpu", "--devices", 2, "--batch-size", 8)),
}
WANTED = {
    "accelerator": ("late", "torch.float32"),
    "bfloat16": ("cpu", "torch.bfloat16"),
    "two-ranks": ("cpu", "torch.float32"),
    "two-chips": ("tpu", "torch.float32"),
}


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no interface for back ends written in Python",
)
def test_all_devices_have_the_same_anchors(processes: Processes) -> None:
    chips = make_chips(processes.root / "chips", 2)
    syncer = processes.syncer(expect=4, quorum=4)
    join = processes.address.join_string()
    running = []
    for name, (_, options) in LEARNERS.items():
        (processes.root / name).mkdir()
        files = ("--out", processes.root / name / "held", "--until", processes.stop_file)
        env = {"DILOCO_JOIN": join, "DILOCO_LEARNER": name, "FAKE_CHIPS": str(chips)}
        running.append(processes.start(name, HERE / "mixed_learner.py", *options, *files, **env))
    processes.until_commits(100)
    processes.stop_file.touch()
    assert [processes.end(process) for process in running] == [0, 0, 0, 0], processes.logs()
    syncer.terminate()
    assert processes.end(syncer) == 0

    held = {
        name: [json.loads(path.read_text()) for path in sorted((processes.root / name).glob("held.*.json"))]
        for name in LEARNERS
    }
    assert {name: (ranks[0]["device"], ranks[0]["dtype"]) for name, ranks in held.items()} == WANTED
    anchors = {name: ranks[0]["digests"] for name, ranks in held.items()}
    for one, other in combinations(anchors.values(), 2):
        both = one.keys() & other.keys()
        assert len(both) > 50
        assert {key: one[key] for key in both} == {key: other[key] for key in both}
    for digests in anchors.values():
        assert len(set(digests.values())) == len(digests), "each version has values of its own"
    for first, second in (held["two-ranks"], held["two-chips"]):
        assert set(first["digests"].values()) <= set(second["digests"])

    summary = processes.summary()
    assert summary["ledger_exact"]
    trained = {learner["id"]: learner["tokens"] for learner in summary["learners"]}
    assert trained == {name: samples * held[name][0]["steps"] for name, (samples, _) in LEARNERS.items()}
