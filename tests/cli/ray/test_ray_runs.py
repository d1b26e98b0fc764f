"""Runs on Ray clusters of several nodes: nodes and the head are lost, learners are added and removed, Ctrl-C.

Nodes are raylets of this machine. A lost machine is a raylet that is killed together with the processes that it hosted.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from lightning_diloco.cli.main import main
from lightning_diloco.cli.ray.cluster import connected
from lightning_diloco.cli.ray.files import Desk
from lightning_diloco.errors import ConfigError, TransportError
from lightning_diloco.storage.tape import read_tape
from lightning_diloco.syncer.shards.layout import num_shards_of
from lightning_diloco.transport.address import read_join_file
from lightning_diloco.transport.flight import FlightConnection
from tests import command
from tests.alive import is_running
from tests.cli.ray.test_keeper import until
from tests.e2e.recorded import assert_recorded_exactly
from tests.e2e.test_engines import TRAIN

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

WITHIN_S = 120.0
NAMES = ("syncer", "l0", "l1", "l0.1", "l1.1")
ON_TWO_HOSTS = (
    TRAIN.replace("devices=1", "devices=1, num_nodes=2")
    .replace('"decoupled_diloco"', "lightning_diloco.DecoupledDiLoCoStrategy(checkpoint_every=10)")
    .replace(
        "class UntilTold(Callback):",
        "class UntilTold(Callback):\n"
        "    def on_train_start(self, trainer, *_):\n"
        "        print('starts at', trainer.global_step, flush=True)\n",
    )
)
QUICK = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",  # others use the machine, too
    "PYTHONPATH": str(command.ROOT),
}


class Site:
    """A cluster whose head runs no processes, and one run on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        (folder / "train.py").write_text(TRAIN)
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.driver: subprocess.Popen[str] | None = None
        self.orphans: list[psutil.Process] = []  # what raylets that end by themselves leave running

    def on_hosts(self, num_hosts: int) -> None:
        """Train on this many hosts per learner."""
        if num_hosts > 1:
            (self.folder / "train.py").write_text(ON_TWO_HOSTS)

    def add(self, num_cpus: int) -> Any:
        """Add a node."""
        return self.cluster.add_node(num_cpus=num_cpus)

    def node_of(self, name: str) -> Any:
        """Return the node of a process."""
        (keeper,) = self.keepers(name)
        raylet = int(keeper.environ()["RAY_RAYLET_PID"])
        return next(node for node in self.cluster.worker_nodes if raylet == raylet_of(node))

    def start(self, num_learners: int, *more: object, waits: bool = True) -> None:
        if waits:
            self.cluster.wait_for_nodes()
        words = ("--engine", "ray", "--learners", num_learners, "--address", self.cluster.address, *more)
        where = ("--run-dir", self.run_dir, "--no-table", "--no-page", "--stop-grace", 60)
        self.driver = command.start(self.folder, "run", "train.py", *words, *where)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        assert self.driver is not None
        deadline_s = time.monotonic() + WITHIN_S
        while True:
            try:
                if found := condition():
                    return found
            except (TransportError, ConfigError):
                pass
            if self.driver.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"{what}: {self._story()}")
            time.sleep(0.05)

    def _story(self) -> str:
        assert self.driver is not None
        self.driver.kill()
        logs = [f"== {log}\n{log.read_text()[-1500:]}" for log in sorted(self.run_dir.rglob("*.txt"))]
        return "\n".join([self.driver.communicate()[0], *logs])

    def status(self) -> dict[str, Any]:
        connection = FlightConnection(read_join_file(self.run_dir / "join"))
        try:
            return connection.status()
        finally:
            connection.close()

    def until_train(self, *names: str) -> None:
        def train() -> bool:
            return {it["id"] for it in self.status()["learners"] if it["phase"] == "stepping"} == set(names)

        self.until(train, f"{names} train")

    def until_commits(self, more: int) -> None:
        wanted = self.until(self.status, "a syncer")["num_commits"] + more
        self.until(lambda: self.status()["num_commits"] >= wanted, f"{wanted} commits")

    def processes(self, *words: str) -> list[psutil.Process]:
        """Return the processes with these words in their command line or environment."""
        return [p for p in psutil.process_iter(["cmdline"]) if {*words} <= {*(p.info["cmdline"] or ())}]

    def keepers(self, name: str) -> list[psutil.Process]:
        return self.processes("lightning_diloco.cli.ray.keeper", str(self.run_dir), name)

    def pids(self) -> dict[str, list[int]]:
        """Return the pids of the processes that keepers have started, by name."""
        return {name: [child.pid for keeper in self.keepers(name) for child in keeper.children()] for name in NAMES}

    def wish(self, name: str) -> str | None:
        order = Desk(self.run_dir, name).order()
        return None if order is None else order.wish

    def groups(self) -> set[str]:
        """Return the states of all placement groups."""
        with connected(self.cluster.address):
            return {group["state"] for group in ray.util.placement_group_table().values()}

    def began(self, name: str) -> int:
        return sum(it["event"] == "began" for it in Desk(self.run_dir, name).events()[0])

    def lose(self, node: Any, *names: str) -> None:
        """Simulate the loss of the machine of these processes."""
        self.cluster.remove_node(node, allow_graceful=False)
        for name in names:
            for keeper in self.keepers(name):
                keeper.kill()

    def lose_head(self) -> None:
        """Simulate the loss of the head, and so of the raylets of all nodes."""
        raylets = [psutil.Process(raylet_of(node)) for node in self.cluster.worker_nodes]
        self.orphans = [child for raylet in raylets for child in raylet.children(recursive=True)]
        self.cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        _, alive = psutil.wait_procs(raylets, timeout=WITHIN_S)
        assert not alive

    def end(self) -> dict[str, Any]:
        """Let the learners finish; return the summary of an exact run."""
        assert self.driver is not None
        (self.folder / "stop").touch()
        said, _ = self.driver.communicate(timeout=WITHIN_S)
        assert self.driver.returncode == 0, said
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        assert summary["status"] == "finished"
        assert summary["ledger_exact"]
        discarded = sum(summary["tokens_discarded"].values())
        assert summary["tokens_seen"] == summary["tokens_merged"] + discarded + summary["tokens_pending"] > 0
        assert_recorded_exactly(self.run_dir)
        assert "summary" in said
        return summary

    def interrupt(self) -> dict[str, Any]:
        """Press Ctrl-C; return the summary of an exact run whose learners left in good order."""
        assert self.driver is not None
        self.driver.send_signal(signal.SIGINT)
        said, _ = self.driver.communicate(timeout=WITHIN_S)
        assert self.driver.returncode == 130, said
        assert "SIGINT: ending the run" in said
        assert "; killed" not in said, said
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        assert (summary["status"], summary["ledger_exact"]) == ("interrupted", True)
        assert_recorded_exactly(self.run_dir)
        return summary

    def until_saved(self, learner: str) -> None:
        """Wait until a learner has another checkpoint."""
        folder = self.run_dir / "learners" / learner / "checkpoints"
        before = {*folder.glob("*")}
        self.until(lambda: {*folder.glob("*")} - before, "a checkpoint")

    def leaves(self) -> list[tuple[str, str]]:
        """Return the learners that left, with their reasons."""
        told = read_tape(self.run_dir / "tape" / "events.jsonl")
        return [(it["learner"], it["reason"]) for it in told if it["event"] == "leave"]

    def until_gone(self) -> None:
        """Wait for the end of all keepers; `diloco run` ends with host 0 of each learner."""
        deadline_s = time.monotonic() + WITHIN_S
        while any(self.keepers(name) for name in NAMES):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    def close(self) -> None:
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.communicate()
        for name in NAMES:
            for keeper in self.keepers(name):
                keeper.kill()
        self.cluster.shutdown()
        for orphan in self.orphans:
            if orphan.is_running():
                orphan.kill()


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.close()


def test_a_learner_whose_machine_is_lost_continues_elsewhere(site: Site) -> None:
    site.add(1), site.add(1)
    site.start(1)
    site.until_train("l0")
    first = site.node_of("l0")
    site.add(1)
    site.lose(first, "l0")
    site.until(lambda: site.began("l0") == 2 and site.keepers("l0"), "another keeper")
    site.until_train("l0")
    site.until_commits(8)
    summary = site.end()
    assert summary["joins"] == 2


def test_a_learner_whose_raylet_is_lost_leaves_before_it_continues_elsewhere(site: Site) -> None:
    site.add(1), site.add(1)
    site.start(1)
    site.until_train("l0")
    (before,) = site.pids()["l0"]
    site.add(1)
    site.lose(site.node_of("l0"))
    assert is_running(before)
    site.until(lambda: site.began("l0") == 2, "another keeper")
    site.until(lambda: not is_running(before), "the old process leaves")
    site.until_train("l0")
    summary = site.end()
    assert site.leaves() == [("l0", "preempted"), ("l0", "finished")]
    assert summary["joins"] == 2


def test_rounds_continue_after_the_machine_of_the_syncer_is_lost(site: Site) -> None:
    site.add(1), site.add(1), site.add(1)
    site.start(2)
    site.until_train("l0", "l1")
    site.until_commits(4)
    before = site.pids()
    site.add(1)
    site.lose(site.node_of("syncer"), "syncer")
    site.until(lambda: site.began("syncer") == 2, "another keeper")
    site.until_commits(8)
    site.until_train("l0", "l1")
    after = site.pids()
    assert (after["l0"], after["l1"]) == (before["l0"], before["l1"]), "learners never stopped"
    assert after["syncer"] != before["syncer"]
    summary = site.end()
    assert summary["joins"] == 2


def starts(site: Site) -> list[int]:
    """Return the steps from which l0 has started."""
    lines = (site.run_dir / "learners" / "l0" / "log.txt").read_text().splitlines()
    return [int(line.split()[2]) for line in lines if line.startswith("starts at ")]


@pytest.mark.parametrize("is_machine", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_learner_of_two_hosts_continues_after_either_is_lost(site: Site, is_machine: bool) -> None:
    (site.folder / "train.py").write_text(ON_TWO_HOSTS)
    for _ in range(5):
        site.add(1)
    site.start(2, "--hosts-per-learner", 2)
    site.until_train("l0", "l1")
    before = site.pids()
    for times, name in enumerate(("l0.1", "l0"), 1):
        site.until_saved("l0")
        assert len({raylet_of(site.node_of(each)) for each in NAMES}) == 5
        site.add(1)
        site.lose(site.node_of(name), *([name] if is_machine else []))
        site.until(lambda name=name: site.began(name) == 2 and len(site.keepers(name)) == 1, "another keeper")
        site.until(lambda times=times: len(starts(site)) == times + 1, "both hosts train again")
        site.until_train("l0", "l1")
        site.until_commits(8)
    after = site.pids()
    assert (after["l1"], after["l1.1"]) == (before["l1"], before["l1.1"]), "the other learner never stopped"
    assert not {*after["l0"], *after["l0.1"]} & {*before["l0"], *before["l0.1"]}
    assert all(step > 0 for step in starts(site)[1:]), "it continues from a checkpoint"
    summary = site.end() if is_machine else site.interrupt()
    assert summary["joins"] == 4
    site.until_gone()


@pytest.mark.parametrize("num_hosts", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_training_continues_to_the_end_after_the_head_is_lost(site: Site, num_hosts: int) -> None:
    site.on_hosts(num_hosts)
    for _ in range(2 * num_hosts):
        site.add(1)
    site.add(1)
    site.start(2, "--hosts-per-learner", num_hosts)
    site.until_train("l0", "l1")
    before = site.pids()
    site.lose_head()
    site.until_commits(8)
    assert site.pids() == before
    victim = "l1" if num_hosts == 1 else "l1.1"
    psutil.Process(*before[victim]).kill()
    for name in dict.fromkeys(("l1", victim)):
        site.until(lambda name=name: site.pids()[name] not in ([], before[name]), "its keeper starts it again")
    site.until_train("l0", "l1")
    summary = site.end()
    assert summary["joins"] == 3


def test_a_run_whose_diloco_run_was_killed_is_taken_over(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.add(3)
    site.start(2)
    site.until_train("l0", "l1")
    before, first = site.pids(), site.driver
    assert first is not None
    first.kill()
    first.communicate()
    again = ["run", str(site.folder / "train.py"), "--engine", "ray", "--run-dir", str(site.run_dir), "--learners"]
    assert main([*again, "3"]) == 2
    assert "goes on with 2 learner(s)" in capsys.readouterr().err
    site.lose_head()  # the files suffice
    site.start(2, waits=False)
    site.until_commits(8)
    assert site.pids() == before
    assert main([*again, "2"]) == 2, "it has been taken over"
    psutil.Process(*before["l1"]).kill()
    site.until(lambda: site.pids()["l1"] not in ([], before["l1"]), "its keeper starts it again")
    site.until_train("l0", "l1")
    summary = site.end()
    assert summary["joins"] == 3
    assert not site.keepers("l0") + site.keepers("syncer")


@pytest.mark.parametrize("num_hosts", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_learners_are_added_and_removed_and_ctrl_c_ends_all_cleanly(
    site: Site, capsys: pytest.CaptureFixture[str], num_hosts: int
) -> None:
    site.on_hosts(num_hosts)
    for _ in range(num_hosts):
        site.add(2)
    site.add(1)
    site.start(1, "--hosts-per-learner", num_hosts)
    site.until_train("l0")
    assert main(["scale", str(site.run_dir), "3"]) == 2
    assert "room for 2 learner(s)" in capsys.readouterr().err
    assert main(["scale", str(site.run_dir), "2"]) == 0
    site.until_train("l0", "l1")
    assert main(["scale", str(site.run_dir), "1"]) == 0
    site.until(lambda: site.wish("l1") == "leave", "an order to leave")
    assert main(["scale", str(site.run_dir), "2"]) == 0  # it may still be leaving
    site.until(lambda: site.began("l1") == 2, "a new keeper")
    site.until_train("l0", "l1")
    assert main(["scale", str(site.run_dir), "1"]) == 0
    site.until_train("l0")
    site.until(lambda: not site.keepers("l1"), "its end")
    site.until_commits(4)
    site.interrupt()
    assert not any(site.keepers(name) for name in NAMES)
    assert site.leaves()[-2:] == [("l1", "preempted"), ("l0", "preempted")]
    until(lambda: site.groups() == {"REMOVED"})


def test_missing_resources_are_named_before_anything_starts(site: Site) -> None:
    site.add(3)
    site.cluster.wait_for_nodes()
    words = ("run", "train.py", "--engine", "ray", "--run-dir", "run", "--learners", 2, "--no-page", "--address")
    ended = command.run(site.folder, *words, site.cluster.address, "--resources-per-learner", '{"GPU": 8}')
    assert ended.returncode == 2
    assert "2 learner(s) need 1 CPU, 8 GPU each" in ended.stderr
    assert "0 GPU" in ended.stderr
    assert not (site.run_dir / "ray" / "syncer.order").exists()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        ended = command.run(site.folder, *words, f"127.0.0.1:{deaf.getsockname()[1]}")
    assert ended.returncode == 2
    assert "no Ray head answers there" in ended.stderr


def test_a_run_without_free_resources_reports_it_and_leaves_nothing_at_its_end(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.add(1), site.add(1)
    site.cluster.wait_for_nodes()
    with connected(site.cluster.address):
        ray.remote(Taken).options(name="taken", lifetime="detached", num_cpus=1).remote()
    site.start(1)
    site.until(lambda: site.began("syncer"), "the syncer")
    site.until((site.run_dir / "ray" / "l0.order").exists, "an order")
    site.until(site.status, "the syncer")
    assert main(["status", str(site.run_dir)]) == 0
    assert "l0: waits for a node" in capsys.readouterr().out
    assert site.driver is not None
    site.driver.send_signal(signal.SIGINT)
    said, _ = site.driver.communicate(timeout=WITHIN_S)
    assert site.driver.returncode == 130, said
    assert "l0: was not placed yet; Ray does not start it again" in said
    assert site.groups() == {"REMOVED"}


class Taken:
    """An actor that holds a CPU."""


def test_without_an_address_a_recipe_runs_on_a_cluster_of_this_machine_that_is_ended(tmp_path: Path) -> None:
    words = ("--engine", "ray", "--learners", 2, "--shards", 2, "--run-dir", "run", "--no-table", "--no-page")
    small = ("--trainer.max_steps", 48, "--data.max_bytes", 400_000)
    said = command.succeed(tmp_path, "run", "tiny/gpt", *words, *small, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "l1 finished" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["joins"], summary["ledger_exact"]) == ("finished", 2, True)
    assert num_shards_of(tmp_path / "run") == 2
    assert all(version > 0 for version in summary["versions"])
    assert summary["eval_loss"] < 6.2, "about log(512) before the training"
    assert not [p for p in psutil.process_iter(["environ"]) if str(tmp_path) in str(p.info["environ"])]
