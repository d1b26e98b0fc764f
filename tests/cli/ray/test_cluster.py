"""Checks of nodes and of the resources of a cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lightning_diloco import __version__
from lightning_diloco.cli.ray import cluster
from lightning_diloco.cli.ray.files import FOLDER, make_folder, write_in_place
from lightning_diloco.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    make_folder(tmp_path)
    write_in_place(tmp_path / FOLDER / "token", "abcd")
    return tmp_path


def problems(run_dir: Path, **changed: str) -> list[str]:
    told = {"token": "abcd", "target": __file__, "cwd": str(run_dir), "version": __version__, **changed}
    return cluster._problems_here(str(run_dir), **told)


def test_a_complete_node_has_no_problems_and_no_leftover_files(run_dir: Path) -> None:
    assert problems(run_dir) == []
    assert [path.name for path in (run_dir / FOLDER).iterdir()] == ["token"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"token": "other"}, "is not shared with it"),
        ({"token": "efgh"}, "is not shared with it (another folder)"),
        ({"target": "/nowhere/train.py"}, "/nowhere/train.py does not exist there"),
        ({"version": "9.9"}, f"has lightning_diloco {__version__}, not 9.9"),
    ],
)
def test_problems_of_a_node_are_named(run_dir: Path, changed: dict[str, str], said: str) -> None:
    (found,) = problems(run_dir, **changed)
    assert said in found


def test_a_run_directory_that_is_not_shared_is_detected(tmp_path: Path) -> None:
    (found,) = problems(tmp_path)
    assert "is not shared with it (No such file or directory)" in found


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("ray.exceptions.RpcError: Timed out while waiting for GCS", "no Ray head answers there"),
        ("ray.exceptions.AuthenticationError: InvalidAuthToken", "refused the token; set RAY_AUTH_MODE=token"),
    ],
)
def test_a_head_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch, printed: str, said: str) -> None:
    unhealthy = subprocess.CompletedProcess[str]((), returncode=1, stderr=printed)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: unhealthy)
    with pytest.raises(ConfigError, match=said):
        cluster.check_head("10.0.0.1:6379")


def with_nodes(monkeypatch: pytest.MonkeyPatch, *have: dict[str, float]) -> None:
    nodes: list[dict[str, Any]] = [
        {"NodeManagerAddress": f"10.0.0.{k}", "Alive": True, "Resources": each} for k, each in enumerate(have, 1)
    ]
    monkeypatch.setattr(cluster, "_nodes", lambda: nodes)


@pytest.mark.parametrize(
    ("have", "num_learners", "fits"),
    [
        ([{"CPU": 3}], 2, True),
        ([{"CPU": 2}], 2, False),  # the syncer needs one
        ([{"CPU": 8, "GPU": 8}, {"CPU": 1}], 8, False),
        ([{"CPU": 1}, {"CPU": 1}, {"CPU": 1}], 2, True),
        ([{"CPU": 0.5}], 1, False),
    ],
)
def test_a_syncer_and_all_learners_must_fit(
    monkeypatch: pytest.MonkeyPatch, have: list[dict[str, float]], num_learners: int, fits: bool
) -> None:
    with_nodes(monkeypatch, *have)
    if fits:
        cluster.check_room({"CPU": 1}, num_learners)
    else:
        with pytest.raises(ConfigError, match="the cluster has room for"):
            cluster.check_room({"CPU": 1, **({"GPU": 2} if "GPU" in have[0] else {})}, num_learners)


@pytest.mark.parametrize(
    ("cpus", "num_learners", "room"),
    [
        ((1, 1, 1, 1, 1), 2, 2),
        ((1, 1, 1, 1), 2, 1),  # the syncer has one of the nodes
        ((8, 1), 1, 1),
        ((8, 1), 2, 1),  # the hosts of a learner are different nodes
        ((9,), 1, 0),
        ((3, 2, 2), 3, 3),
        ((2, 2, 1), 3, 2),
    ],
)
def test_the_hosts_of_a_learner_are_different_nodes(
    monkeypatch: pytest.MonkeyPatch, cpus: tuple[float, ...], num_learners: int, room: int
) -> None:
    with_nodes(monkeypatch, *({"CPU": number} for number in cpus))
    if room == num_learners:
        cluster.check_room({"CPU": 1}, num_learners, 2)
    else:
        with pytest.raises(ConfigError) as found:
            cluster.check_room({"CPU": 1}, num_learners, 2)
        assert f"{num_learners} learner(s) need 1 CPU on each of 2 nodes, and the syncer 1 CPU" in str(found.value)
        assert f"has room for {room} learner(s)" in str(found.value)
        assert "--hosts-per-learner" in str(found.value)


@pytest.mark.parametrize(("num_hosts", "strategy"), [(1, "STRICT_PACK"), (3, "STRICT_SPREAD")])
def test_each_host_of_a_learner_gets_a_node_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_hosts: int, strategy: str
) -> None:
    group, remote = Mock(), Mock()
    monkeypatch.setattr(cluster, "placement_group", group)
    monkeypatch.setattr(cluster.ray, "remote", remote)
    cluster.place("known", "l0", tmp_path, {"CPU": 2, "GPU": 8}, in_group=True, num_hosts=num_hosts)
    group.assert_called_once_with(
        [{"CPU": 2, "GPU": 8}] * num_hosts, strategy=strategy, name="known", lifetime="detached"
    )
    actors = remote.return_value.options.call_args_list
    assert [it.kwargs["name"] for it in actors] == ["known", "known.1", "known.2"][:num_hosts]
    bundles = [it.kwargs["scheduling_strategy"].placement_group_bundle_index for it in actors]
    assert bundles == [0, 1, 2][:num_hosts]
    started = [it.args[1] for it in remote.return_value.options.return_value.remote.call_args_list]
    assert started == ["l0", "l0.1", "l0.2"][:num_hosts]


def test_the_message_names_needed_and_available_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    with_nodes(monkeypatch, {"CPU": 16, "GPU": 8}, {"CPU": 4})
    with pytest.raises(ConfigError) as found:
        cluster.check_room({"CPU": 1, "GPU": 8}, 2)
    assert "2 learner(s) need 1 CPU, 8 GPU each" in str(found.value)
    assert "room for 1 learner(s): 10.0.0.1 has 16 CPU, 8 GPU; 10.0.0.2 has 4 CPU, 0 GPU" in str(found.value)
