"""Runs started by engines: by the contract alone, and by the files of every engine, with killed and preempted learners.

The engines' own commands (ssh, scp, systemd-run, scontrol) are stand-ins that run their arguments here. Each learner
runs in a folder of its own, with the files that its engine takes to its machine; those of SLURM share one. The syncer,
the learners and the signals are real.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lightning_diloco.cli.main import main
from lightning_diloco.cli.sites.launch import ENGINES
from lightning_diloco.transport.address import read_join_file
from lightning_diloco.transport.flight import FlightConnection
from tests.e2e.conftest import HERE, until
from tests.e2e.engine import Engine
from tests.e2e.recorded import assert_recorded_exactly

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

TRAIN = """
import os
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_diloco  # noqa: F401


class Model(BoringModel):
    def configure_optimizers(self):  # at a constant rate: BoringModel's own one falls by ten in each epoch of a learner
        return torch.optim.SGD(self.parameters(), lr=0.001)


class UntilTold(Callback):
    def on_train_batch_end(self, trainer, *_):
        time.sleep(0.02)
        trainer.should_stop = os.path.exists(os.environ.get("STOP", "stop"))


trainer = L.Trainer(strategy="decoupled_diloco", accelerator="cpu", devices=1, max_epochs=-1, logger=False,
                    limit_val_batches=0, enable_progress_bar=False, callbacks=[UntilTold()])
trainer.fit(Model())
"""
STRATEGY = '"decoupled_diloco"'
SYSTEMD_RUN = """
while [ "${1#-}" != "$1" ]; do
    case $1 in
    --user | --same-dir | --collect | --unit=*) ;;
    -E) export "$2" && shift ;;
    -p)
        case $2 in
        EnvironmentFile=/*) set -a && . "${2#*=}" && set +a || exit 1 ;;
        Restart=* | RestartSec=* | RestartPreventExitStatus=* | TimeoutStopSec=*) ;;
        *) echo "$2: an unknown property, or its path is not absolute" >&2 && exit 1 ;;
        esac
        shift
        ;;
    *) echo "$1: unknown" >&2 && exit 1 ;;
    esac
    shift
done
exec "$@"
"""
STAND_INS = {
    "diloco": f'exec {sys.executable} -m lightning_diloco.cli.main "$@"',
    "hostname": "echo 127.0.0.1",
    "curl": "echo 127.0.0.1",
    "scontrol": 'echo "$@" >>requeued && exit 143',
    "ssh": 'mkdir -p "$MACHINES/$1" && cd "$MACHINES/$1" && shift && exec bash -c "$*"',
    "scp": '[ "$1" = -qr ] && mkdir -p "$MACHINES/${3%:}" && cp -r "$2" "$MACHINES/${3%:}"',
    "systemd-run": SYSTEMD_RUN,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(folder)
    try:
        yield engine
    finally:
        engine.close()


def base(folder: Path) -> dict[str, str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    places = {"STOP": str(folder / "stop"), "MACHINES": str(folder / "machines")}
    return {"PATH": path, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", **places}


def training(folder: Path) -> set[str]:
    """Return the learners that have made a step; others may still wait for a message of the syncer."""
    connection = FlightConnection(read_join_file(folder / "run" / "join"))
    try:
        learners = connection.status()["learners"]
    finally:
        connection.close()
    return {member["id"] for member in learners if member["phase"] == "stepping" and member["step"] > 0}


def until_all_train(engine: Engine, folder: Path, names: set[str]) -> None:
    until((folder / "run" / "join").exists, "the join file")
    until(lambda: engine.look() or training(folder) >= names, f"{names} train")


def end(engine: Engine, folder: Path) -> dict:
    (folder / "stop").touch()
    until(engine.look, "the end of all")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert_recorded_exactly(folder / "run")
    return summary


def test_the_contract_is_enough_for_an_engine(engine: Engine, folder: Path) -> None:
    def serve() -> None:
        words = "diloco syncer --run-dir run --listen 127.0.0.1:0 --expect 2 --data-parts 2 --lease-s 5"
        engine.start("syncer", shlex.split(words), base(folder))

    serve()
    until((folder / "run" / "join").exists, "the join file")
    before = read_join_file(folder / "run" / "join")
    for name in ("l0", "l1"):
        told = {"DILOCO_JOIN": before.join_string(), "DILOCO_LEARNER": name, "DILOCO_RUN_DIR": str(folder / "run")}
        engine.start(name, ["diloco", "fit", "train.py"], {**base(folder), **told})
    until_all_train(engine, folder, {"l0", "l1"})
    engine.kill("l0")
    engine.preempt("l1")
    until(lambda: engine.look() or len(engine.codes) == 2, "two that died")
    until_all_train(engine, folder, {"l0", "l1"})

    # The machine of the syncer is lost; another machine has its disk and a different address.
    engine.kill("syncer")
    serve()
    until(lambda: read_join_file(folder / "run" / "join").port != before.port, "the new address")
    until_all_train(engine, folder, {"l0", "l1"})

    # The syncer is away when training ends, so the last contributions wait for it.
    engine.kill("syncer")
    (folder / "stop").touch()
    waits = "the last contributions wait for the syncer"
    until(lambda: all(waits in (folder / f"{name}.log").read_text() for name in ("l0", "l1")), "the end of training")
    serve()
    summary = end(engine, folder)
    assert summary["tokens_merged"] + sum(summary["tokens_discarded"].values()) == summary["tokens_seen"]
    assert "before all of this learner's work was merged" not in (folder / "l0.log").read_text()
    assert engine.codes == {"l0": [-9, 0], "l1": [143, 0], "syncer": [0]}


@pytest.mark.parametrize("code", [143, 1], ids=["preempted", "has waited long enough"])
def test_a_learner_that_ends_without_a_syncer_is_restarted_and_finishes(
    engine: Engine, folder: Path, code: int
) -> None:
    if code == 1:
        (folder / "train.py").write_text(TRAIN.replace(STRATEGY, "lightning_diloco.DecoupledDiLoCoStrategy(drain_s=1)"))

    def serve(port: int) -> None:
        words = f"diloco syncer --run-dir run --listen 127.0.0.1:{port} --expect 1"
        engine.start("syncer", shlex.split(words), base(folder))

    serve(0)
    until((folder / "run" / "join").exists, "the join file")
    address = read_join_file(folder / "run" / "join")
    told = {"DILOCO_JOIN": address.join_string(), "DILOCO_LEARNER": "l0", "DILOCO_RUN_DIR": str(folder / "run")}
    engine.start("l0", ["diloco", "fit", "train.py"], {**base(folder), **told})
    until_all_train(engine, folder, {"l0"})
    engine.kill("syncer")
    (folder / "stop").touch()
    log = folder / "l0.log"
    until(lambda: "the last contributions wait for the syncer" in log.read_text(), "the end of training")
    if code == 143:
        engine.preempt("l0")
    until(lambda: engine.has_ended("l0"), "its end")  # without `look`, which would restart the syncer
    said = {143: "before all of this learner's work was merged. Its next", 1: "exit code 1: the run was left at step"}
    assert said[code] in log.read_text()
    assert "has not ended; it ends now" not in log.read_text()
    serve(address.port)
    end(engine, folder)
    assert engine.codes == {"l0": [code, 0], "syncer": [0]}


def test_a_process_with_a_permanent_error_is_not_restarted(engine: Engine, folder: Path) -> None:
    engine.start("none", ["diloco", "fit", "train.py"], base(folder))
    engine.start("wrong", ["diloco", "fit", "train.py"], {**base(folder), "DILOCO_JOIN": "nonsense"})
    until(engine.look, "the end of both")
    assert engine.codes == {"none": [2], "wrong": [2]}


def text_of(folder: Path, engine: str, name: str) -> str:
    """Return the text of a written file, with the address and the folder of this test."""
    text = (folder / engine / name).read_text()
    return text.replace("0.0.0.0:7654", "127.0.0.1:0").replace("/files", str(folder / "run"))


def by_slurm(folder: Path, name: str, join: str) -> tuple[list[str], dict[str, str], Path]:
    shared = folder / "slurm"  # of all nodes
    (shared / "here.sh").write_text(text_of(folder, "slurm", "learners.sh"))
    return ["bash", "here.sh"], {"SLURM_ARRAY_TASK_ID": name[1:], "SLURM_JOB_ID": "77"}, shared


def by_skypilot(folder: Path, name: str, join: str) -> tuple[list[str], dict[str, str], Path]:
    task = yaml.safe_load(text_of(folder, "skypilot", "learner.yaml").replace("l0", name))
    assert task["secrets"] == {"DILOCO_JOIN": None}
    machine = folder / "machines" / name
    shutil.copytree(folder / "skypilot" / task["workdir"], machine)
    return ["bash", "-c", task["run"]], {**task["envs"], "RUN": "run", "DILOCO_JOIN": join}, machine


def by_jobset(folder: Path, name: str, join: str) -> tuple[list[str], dict[str, str], Path]:
    told = yaml.safe_load(text_of(folder, "jobset", "learner.yaml").replace("l0}", f"{name}}}"))
    pod = told["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    machine, configmaps = folder / "machines" / name, {"diloco-recipe": folder / "jobset" / "recipe"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in container["volumeMounts"]:
        path = machine / mount["mountPath"].removeprefix("/")
        path.mkdir(parents=True)
        if about := volumes[mount["name"]].get("configMap"):
            shutil.copytree(configmaps[about["name"]], path, dirs_exist_ok=True)
    env = {each["name"]: each.get("value", join) for each in container["env"]}
    command = [word.replace("$(RECIPE)", env["RECIPE"]) for word in container["command"]]
    return command, env, machine / container["workingDir"].removeprefix("/")


def by_ssh(folder: Path, name: str, join: str) -> tuple[list[str], dict[str, str], Path]:
    (folder / "ssh" / "run").mkdir()
    (folder / "ssh" / "run" / "join").write_text(join)
    return ["./learners.sh", "start", name], {}, folder / "ssh"


def test_the_files_of_all_engines_start_learners_of_one_run(engine: Engine, folder: Path) -> None:
    (folder / "train.py").rename(folder / "my train.py")
    for each in ENGINES:
        words = ["launch", str(folder / "my train.py"), "--engine", each, "--learners", "4", "--to", str(folder / each)]
        assert main(words) == 0
    (folder / "my train.py").unlink()
    (folder / "run").mkdir()
    (folder / "slurm" / "run").symlink_to(folder / "run")
    (folder / "slurm" / "serve.sh").write_text(text_of(folder, "slurm", "syncer.sh"))
    engine.start("syncer", ["bash", "serve.sh"], base(folder), folder / "slurm")
    until((folder / "run" / "join").exists, "the join file")
    join = (folder / "run" / "join").read_text().strip()
    learners = {"l0": by_slurm, "l1": by_skypilot, "l2": by_jobset, "l3": by_ssh}
    for name, command_of in learners.items():
        command, env, cwd = command_of(folder, name, join)
        engine.start(name, command, {**base(folder), **env}, cwd)
    until_all_train(engine, folder, set(learners))
    engine.preempt("l0")
    requeued = folder / "slurm" / "requeued"
    until(lambda: engine.look() or requeued.exists(), "the job is queued again")
    assert requeued.read_text() == "requeue 77\n"
    for name in ("l1", "l2", "l3"):
        engine.kill(name)
    until(lambda: engine.look() or set(engine.codes) == set(learners), "all died")
    until_all_train(engine, folder, set(learners))
    end(engine, folder)
    assert engine.codes == {"syncer": [0], "l0": [143, 0], "l1": [-9, 0], "l2": [-9, 0], "l3": [-9, 0]}


def test_a_host_that_cannot_be_reached_keeps_no_other_from_starting(folder: Path) -> None:
    assert main(["launch", "tiny/gpt", "--engine", "ssh", "--learners", "2", "--to", str(folder / "ssh")]) == 0
    (folder / "ssh" / "run").mkdir()
    (folder / "ssh" / "run" / "join").write_text("secret")
    (folder / "machines").mkdir()
    (folder / "machines" / "away").write_text("")  # so that nothing can be written there
    (folder / "bin" / "diloco").write_text('#!/bin/bash\necho "$DILOCO_LEARNER $DILOCO_JOIN: $*"')
    env = {**os.environ, **base(folder)}

    def start(*hosts: str) -> subprocess.CompletedProcess[str]:
        words = ["./learners.sh", "start", *hosts]
        return subprocess.run(words, cwd=folder / "ssh", env=env, capture_output=True, text=True, check=False)

    said = start("away", "here")
    assert (said.returncode, said.stdout) == (1, "here secret: fit tiny/gpt\n")
    assert "away: not started\n" in said.stderr
    assert (folder / "machines" / "here" / "diloco.env").stat().st_mode & 0o777 == 0o600
    (folder / "ssh" / "run" / "join").unlink()
    said = start("here")
    assert (said.returncode, said.stdout) == (1, "")
    assert "run/join" in said.stderr
