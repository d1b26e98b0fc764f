"""Learners of all layouts in one run: one device, ranks with DDP, ranks with FSDP2, and one XLA device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.storage.tape import read_tape
from tests.e2e.conftest import Processes, until
from tests.e2e.test_ranks import furthest

pytestmark = [pytest.mark.xla, pytest.mark.slow, pytest.mark.thorough]

LAYOUTS: dict[str, tuple[object, ...]] = {
    "one": (),
    "ddp": ("--devices", 2),
    "fsdp2": ("--devices", 2, "--inner", "fsdp2"),
    "xla": ("--accelerator", "xla"),
}
STRATEGIES = {
    "one": "SingleDeviceDiLoCo",
    "ddp": "DDPDiLoCo",
    "fsdp2": "ModelParallelDiLoCo",
    "xla": "SingleDeviceXLADiLoCo",
}
NUM_STEPS, NUM_FRAGMENTS = 16, 2
OF_THE_RUN: dict[str, object] = {
    "sync_every": 4,
    "num_fragments": NUM_FRAGMENTS,
    "overlap": 1,
    "quorum": len(LAYOUTS),
    "grace": 600.0,
    "lease_s": 600.0,
    "data_parts": 1,  # the test decides which learner reads which samples
    "waits_for_all": True,
}
NOT_THE_LEARNERS = json.dumps(dict.fromkeys(("sync_every", "num_fragments", "overlap")))


class Fleet:
    """One run, from its start to its end.

    Args:
        root: folder of its files, which is created.
        layouts: layouts of its learners, by name.
        wire: wire precision of the run.

    Attributes:
        held: final values of the ranks of each learner, by learner.
        commits: commits of the run, in the order of fragments and versions.
    """

    def __init__(self, root: Path, layouts: dict[str, tuple[object, ...]], wire: str) -> None:
        root.mkdir()
        self._processes = Processes(root)
        try:
            self._run(layouts, wire)
        finally:
            self._processes.kill_all()
        self.held = {name: self._processes.ranks_held(name) for name in layouts}
        tape = read_tape(self._processes.run_dir / "tape" / "events.jsonl")
        commits = [line for line in tape if line["event"] == "commit"]
        self.commits = sorted(commits, key=lambda commit: (commit["fragment"], commit["version"]))

    def _run(self, layouts: dict[str, tuple[object, ...]], wire: str) -> None:
        processes, go = self._processes, self._processes.root / "go"
        syncer = processes.syncer(len(layouts), wire=wire, **OF_THE_RUN)
        join = processes.address.join_string()
        paced = ("--paced", "--go", go, "--steps", NUM_STEPS, "--options", NOT_THE_LEARNERS)
        learners = [
            processes.trainer(name, *paced, "--part", k, len(layouts), *layout, DILOCO_JOIN=join, DILOCO_LEARNER=name)
            for k, (name, layout) in enumerate(layouts.items())
        ]
        first = [1] * len(layouts)
        until(lambda: [m["step"] for m in processes.status()["learners"]] == first, "the first steps", processes)
        go.touch()
        assert [processes.end(process) for process in (*learners, syncer)] == [0] * (len(layouts) + 1)

    @property
    def anchor(self) -> dict[str, Any]:
        """Return the final anchor, whose bits must be equal on every rank of every learner."""
        found = [rank for ranks in self.held.values() for rank in ranks]
        assert all(rank["params"] == found[0]["params"] for rank in found)
        return found[0]

    @property
    def exchanged(self) -> list[tuple[Any, ...]]:
        """Return the steps and tokens that each learner contributed to each version."""
        names = ("learners", "tokens", "steps", "staleness")
        return [
            (commit["fragment"], commit["version"], sorted(zip(*(commit[name] for name in names), strict=True)))
            for commit in self.commits
        ]

    @property
    def seen(self) -> dict[str, list[int]]:
        """Return the samples that each learner trained on."""
        return {name: sorted(index for rank in ranks for index in rank["seen"]) for name, ranks in self.held.items()}


def test_learners_of_all_layouts_in_one_run_give_the_anchors_of_learners_on_one_device(tmp_path: Path) -> None:
    """Samples and contributions of each learner are the same in all runs; only the layouts differ."""
    alike: dict[str, tuple[object, ...]] = dict.fromkeys(LAYOUTS, ())
    exact, exact_alike = Fleet(tmp_path / "exact", LAYOUTS, "fp32"), Fleet(tmp_path / "exact-alike", alike, "fp32")
    coarse, coarse_alike = Fleet(tmp_path / "coarse", LAYOUTS, "int8"), Fleet(tmp_path / "coarse-alike", alike, "int8")
    for fleet in (exact, coarse):
        assert {name: ranks[0]["strategy"] for name, ranks in fleet.held.items()} == STRATEGIES
    for fleet in (exact, coarse, coarse_alike):
        assert fleet.seen == exact_alike.seen
        assert fleet.exchanged == exact_alike.exchanged
    assert len(exact.exchanged) >= NUM_STEPS // 4 * NUM_FRAGMENTS
    assert all([learner for learner, *_ in merged] == sorted(LAYOUTS) for *_, merged in exact.exchanged)

    assert furthest(exact.anchor, exact_alike.anchor) < 1e-6
    of_quantizer = furthest(exact_alike.anchor, coarse_alike.anchor)
    assert of_quantizer > 1e-5
    assert furthest(coarse.anchor, coarse_alike.anchor) < of_quantizer
