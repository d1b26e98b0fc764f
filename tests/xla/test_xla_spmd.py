"""SPMD is switched on for a whole process, before its first tensor, so its tests run in new processes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.xla, pytest.mark.slow]

HERE = Path(__file__).parent


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        check=False,
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", **environment},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=570,
    )


def results(*argv: str, **environment: str) -> dict[str, Any]:
    """Return the last line that a module printed."""
    return results_of(run("-m", *argv, **environment))


def results_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_cases_pass_on_four_devices() -> None:
    cases = [str(HERE / f"spmd_{subject}_cases.py") for subject in ("fragment", "host", "trainer")]
    done = run("-m", "pytest", "-q", "-n", "0", "-m", "xla", *cases)
    assert done.returncode == 0, done.stdout[-8000:]


@cache
def losses(num_devices: str) -> dict[str, Any]:
    """Return losses by batch size; shuffled as Lightning does for several processes."""
    return results("tests.xla.losses", num_devices, "8", "6", "8-shuffled", CPU_NUM_DEVICES=num_devices)


@pytest.mark.parametrize("batch_size", ["8", "6"])  # with 6 samples, one device has only padding
def test_losses_on_four_devices_equal_those_on_one_xla_device(batch_size: str) -> None:
    one, four = (losses(count)[batch_size] for count in ("1", "4"))
    assert (one["strategy"], four["strategy"]) == ("SingleDeviceXLADiLoCo", "SpmdXLADiLoCo")
    assert four["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert len(set(one["losses"])) == 16


def test_two_hosts_train_as_one_learner(tmp_path: Path) -> None:
    """Each host also computes the other's part (see hosts.py), but reads, sends and loads only its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "DILOCO_LEARNER": "slice"}
    said |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "XLA_SAVE_TENSORS_FMT": "text"}
    processes, logs = [], [tmp_path / f"{number}.txt" for number in range(2)]
    for number, log in enumerate(logs):
        with log.open("w") as out:
            argv = [sys.executable, "-m", "tests.xla.hosts", str(number), str(tmp_path)]
            env = {**os.environ, **said, "XLA_SAVE_TENSORS_FILE": str(tmp_path / f"graphs{number}")}
            processes.append(subprocess.Popen(argv, env=env, cwd=HERE.parents[1], stdout=out, stderr=out))
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "".join(log.read_text()[-4000:] for log in logs)

    first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert (first.pop("rank"), second.pop("rank")) == (0, 1)
    assert first == second  # losses, parameters, and the times of exchanges
    texts = [path.read_text() for path in sorted(tmp_path.glob("graphs*"))]
    graphs = [re.findall(r"^Graph Hash: (\w+)", text, re.MULTILINE) for text in texts]
    assert len(graphs[0]) > 2 * len(first["losses"])
    assert len(set(graphs[0])) <= 32  # an exchange needs no new graph
    assert graphs[0] == graphs[1]  # otherwise hosts would wait for each other forever
    assert first["strategy"] == "SpmdXLAHostsDiLoCo"
    assert first["dry"] == pytest.approx(losses("4")["8-shuffled"]["losses"], rel=1e-5)
    assert len([fragment for name, fragment in first["made"] if name == "land"]) > 20
    assert first["val_losses"][-1] < 0.5 * first["val_losses"][0]
    saved = torch.load(tmp_path / "saved" / "learners" / "slice" / "step=30.ckpt", weights_only=True)
    assert all(bool(value.isfinite().all() and value.any()) for value in saved["state_dict"].values())
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob("diloco/*/summary.json"))
    assert (summary["status"], summary["ledger_exact"], summary["joins"]) == ("finished", True, 1)
    assert summary["tokens_seen"] == 4 * len(first["losses"]) * 8


def test_exchanges_gather_values_only_if_blocks_or_rows_require_it(tmp_path: Path) -> None:
    expected = {
        "1024x256:1": 0,  # whole blocks: only two norms
        "1024x384:1": 1 / 32,  # the last 32 columns of a device share their block with the next device's first
        "1024x256:0": 2,  # the rows of a slice are on two devices, so the whole parameter is gathered
    }
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    found = results("tests.xla.collectives", str(tmp_path), *expected, XLA_FLAGS=flags)
    for case, share in expected.items():
        assert found[case]["largest_collective"] == max(1, share * found[case]["fragment"])


def test_learner_with_one_of_several_devices_trains_on_it(tmp_path: Path) -> None:
    """Its link's threads must upload to this device, too."""
    script = """
import json, sys, torch
from pathlib import Path
from tests.xla.test_xla_trainer import Line, loader, trainer_for
torch.manual_seed(5)
model = Line()
trainer = trainer_for(Path(sys.argv[1]), 60, devices=[2], val_check_interval=20)
trainer.fit(model, loader(), loader())
print(json.dumps({"device": str(trainer.strategy.root_device), "val_losses": model.val_losses}))
"""
    found = results_of(run("-c", script, str(tmp_path)))
    assert found["device"] == "xla:2"
    assert found["val_losses"][-1] < 0.5 * found["val_losses"][0]
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob("diloco/*/summary.json"))
    assert summary["ledger_exact"]
    assert summary["tokens_merged"] == summary["tokens_seen"] > 0


def test_spmd_that_is_switched_on_too_late_is_refused() -> None:
    script = """
import torch, torch_xla, lightning as L, lightning_diloco
torch.ones(2).to("xla")
L.Trainer(accelerator="xla", devices=4, strategy="decoupled_diloco", logger=False)
"""
    done = run("-c", script)
    assert done.returncode == 1
    assert "ConfigError: several XLA devices were requested after tensors were made on one" in done.stderr
