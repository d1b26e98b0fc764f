"""Learners with several processes: two ranks with gloo, real Trainers, a real syncer."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.e2e.conftest import HERE, Processes, until

pytestmark = pytest.mark.slow

PACED = ("--paced", "--options", json.dumps({"wire": "fp32"}))
OF_THE_RUN = json.dumps({"sync_every": None, "num_fragments": None, "overlap": None})
NUM_STEPS, NUM_BATCH, SAVE_AT = 24, 8, 13
VALIDATE_EVERY = 5


def are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all but one in a hundred values are equal up to 1e-5, and the others up to a step of bfloat16.

    Outer gradients are rounded to bfloat16. Ranks add in another order, so a value between two bfloat16 values may be
    rounded to either: one of 272 on an Intel Xeon, none on an AMD EPYC. Later steps then differ a little.
    """
    apart = (one - other).abs()
    return bool((apart > 1e-5).sum() <= max(1, apart.numel() // 100) and apart.max() < 1e-3)


def ends_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = [(torch.tensor(values), torch.tensor(other["params"][name])) for name, values in one["params"].items()]
    return all(are_alike(*pair) for pair in pairs)


def furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of any parameter."""
    pairs = [(torch.tensor(values), torch.tensor(other["params"][name])) for name, values in one["params"].items()]
    return max((a - b).abs().max().item() for a, b in pairs)


def summary(processes: Processes, name: str) -> dict[str, Any]:
    (path,) = (processes.root / name).glob("diloco/*/summary.json")
    return json.loads(path.read_text())


def test_several_ranks_give_the_anchors_of_one_device(processes: Processes) -> None:
    """Batches and the times of exchanges are the same in all runs; only the layout differs."""
    several = ("--devices", 2)
    layouts = {
        "one": (),
        "scripts": several,
        "fsdp": (*several, "--inner", "fsdp"),
        "fsdp2": (*several, "--inner", "fsdp2"),
        "fsdp2-tp": ("--devices", 4, "--inner", "fsdp2-tp"),
        "spawned": (*several, "--inner", "spawn", "--steps", NUM_STEPS - 1),
    }
    for name, layout in layouts.items():
        assert processes.end(processes.trainer(name, *PACED, "--save-at", SAVE_AT, *layout)) == 0

    (one,), (spawned,) = processes.ranks_held("one"), processes.ranks_held("spawned")
    assert not ends_alike(one, spawned), "one step less makes a difference"
    sharded = {"fsdp": "FSDPDiLoCo", "fsdp2": "ModelParallelDiLoCo", "fsdp2-tp": "ModelParallelDiLoCo"}
    for name, strategy in {"scripts": "DDPDiLoCo", **sharded}.items():
        assert manifest(processes, name)["frozen"] == manifest(processes, "one")["frozen"]
        assert val_losses(processes, name) == pytest.approx(val_losses(processes, "one"), abs=1e-6)
        for rank in processes.ranks_held(name):
            assert (rank["strategy"], len(rank["seen"])) == (strategy, NUM_STEPS * NUM_BATCH // 2)
            assert ends_alike(one, rank)
        assert summary(processes, name)["rounds"] == summary(processes, "one")["rounds"]
        pairs = zip(saved(processes, name), saved(processes, "one"), strict=True)
        assert all(are_alike(*pair) for pair in pairs)
    for name in ("scripts", *sharded, "spawned"):
        found, steps = summary(processes, name), NUM_STEPS - (name == "spawned")
        assert (found["status"], found["joins"], found["ledger_exact"]) == ("finished", 1, True)
        assert found["tokens_seen"] == found["tokens_merged"] == steps * NUM_BATCH * len(found["versions"])


@pytest.mark.parametrize("inner", [pytest.param("fsdp-sharded", marks=pytest.mark.thorough), "fsdp2-sharded"])
def test_training_continues_from_a_sharded_checkpoint_which_holds_the_anchor(processes: Processes, inner: str) -> None:
    paced = (*PACED, "--momentum", 0.9)
    several = (*paced, "--devices", 2, "--inner", inner)
    for name, layout in {"one": paced, "sharded": several}.items():
        assert processes.end(processes.trainer(name, "--save-at", SAVE_AT, *layout)) == 0
    folder = processes.root / "sharded" / "held.ckpt"
    dcp_to_torch_save(folder, whole := processes.root / "whole.ckpt")
    of_one = torch.load(processes.root / "one" / "held.ckpt", weights_only=True)["state_dict"]
    found = torch.load(whole, weights_only=False)["model" if inner == "fsdp-sharded" else "state_dict"]
    assert found.keys() == of_one.keys()
    assert all(are_alike(found[name], values) for name, values in of_one.items())

    again = ("--ckpt", folder, "--steps", SAVE_AT)  # nothing is left to train
    assert processes.end(processes.trainer("again", *several, *again)) == 0
    for rank in processes.ranks_held("again"):
        assert rank["steps"] == SAVE_AT
        assert all(are_alike(torch.tensor(values), of_one[name].flatten()) for name, values in rank["params"].items())
    assert processes.end(processes.trainer("further", *several, "--ckpt", folder)) == 0
    assert summary(processes, "further")["tokens_merged"] == (NUM_STEPS - SAVE_AT) * NUM_BATCH * 2


@pytest.mark.thorough
def test_long_runs_differ_by_less_than_a_quantization_step(processes: Processes) -> None:
    """Sums in another order move a value by at most one int8 step, and error feedback corrects this."""
    runs = {"fp32": (*PACED,), "one": ("--paced",), "fsdp2": ("--paced", "--devices", 2, "--inner", "fsdp2")}
    for name, arguments in runs.items():
        assert processes.end(processes.trainer(name, *arguments, "--steps", 200)) == 0
    (exact,), (one,) = processes.ranks_held("fp32"), processes.ranks_held("one")
    of_quantizer = furthest(exact, one)
    assert of_quantizer > 1e-5
    assert all(furthest(one, rank) < of_quantizer for rank in processes.ranks_held("fsdp2"))
    assert summary(processes, "fsdp2")["rounds"] == summary(processes, "one")["rounds"] > 50


@pytest.mark.parametrize("inner", [pytest.param("auto", marks=pytest.mark.thorough), "fsdp2"])
def test_all_ranks_adopt_the_anchors_of_a_restored_run_directory(processes: Processes, inner: str) -> None:
    syncer = processes.syncer(data_parts=1)
    steps = ("--steps", 100_000, "--pause-s", 0.02, "--stop-file", processes.stop_file)
    several = ("--devices", 2, "--inner", inner, "--options", OF_THE_RUN)
    found = {"DILOCO_JOIN": processes.address.join_string(), "DILOCO_LEARNER": "several"}
    learner = processes.trainer("several", *several, *steps, **found)
    until(lambda: processes.status()["num_commits"] >= 4, "commits", processes)
    shutil.copytree(processes.run_dir, processes.root / "backup")
    processes.until_commits(8)
    syncer.kill()
    syncer.wait()
    shutil.rmtree(processes.run_dir)
    (processes.root / "backup").rename(processes.run_dir)
    processes.syncer(data_parts=1)
    processes.until_commits(8)
    processes.stop_file.touch()
    assert processes.end(learner) == 0
    one, other = processes.ranks_held("several")
    assert furthest(one, other) < 1e-6
    assert "regenerated" in (processes.root / "syncer.log").read_text()


def manifest(processes: Processes, name: str) -> dict[str, Any]:
    (path,) = (processes.root / name).glob("diloco/*/manifest.json")
    return json.loads(path.read_text())


def val_losses(processes: Processes, name: str) -> list[float]:
    """Return the mean over ranks in each validation; later steps must not use the validated parameters."""
    found = torch.tensor([rank["val_losses"] for rank in processes.ranks_held(name)])
    assert found.shape[1] > NUM_STEPS // VALIDATE_EVERY
    return found.mean(0).tolist()


def saved(processes: Processes, name: str) -> list[torch.Tensor]:
    """Return the anchor in a checkpoint."""
    return list(torch.load(processes.root / name / "held.ckpt", weights_only=True)["state_dict"].values())


def rank_pids(processes: Processes, name: str) -> dict[int, int]:
    found = re.findall(r"rank (\d+) is process (\d+)", (processes.root / f"{name}.log").read_text())
    return {int(rank): int(pid) for rank, pid in found}


def phases(processes: Processes) -> dict[str, str]:
    return {learner["id"]: learner["phase"] for learner in processes.status()["learners"]}


def test_learners_of_different_layouts_share_a_run_and_fail_independently(processes: Processes) -> None:
    layouts = {"one": (), "ddp": ("--devices", 2), "fsdp2": ("--devices", 2, "--inner", "fsdp2")}
    processes.syncer(data_parts=len(layouts))
    join = processes.address.join_string()
    script = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    learners = {}
    for name, layout in layouts.items():
        (processes.root / name).mkdir()
        trainer = (HERE / "trainer.py", "--out", processes.root / name / "held", "--options", OF_THE_RUN, *layout)
        started = (*(script if layout else ()), *trainer, "--pause-s", 0.02, "--steps", 100_000)
        learners[name] = processes.start(name, *started, DILOCO_JOIN=join, DILOCO_LEARNER=name)
    until(lambda: phases(processes) == dict.fromkeys(layouts, "stepping"), "all of them", processes)
    processes.until_commits(8)
    pids = {
        name: until(lambda name=name: rank_pids(processes, name), "ranks", processes)[1] for name in ("ddp", "fsdp2")
    }

    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    stopped = dict.fromkeys(layouts, "lapsed") | {"one": "stepping"}
    until(lambda: phases(processes) == stopped, "the lapse of learners with a stopped rank", processes)
    processes.until_commits(8)
    for pid in pids.values():
        os.kill(pid, signal.SIGCONT)
    until(lambda: phases(processes) == dict.fromkeys(layouts, "stepping"), "their return", processes)
    processes.until_commits(8)

    for name, pid in pids.items():
        os.kill(pid, signal.SIGKILL)
        assert processes.end(learners[name]) != 0
        assert not [p for p in rank_pids(processes, name).values() if psutil.pid_exists(p)]
    processes.until_commits(8)
    assert learners["one"].poll() is None
