"""`Trainer(accelerator="torch_tpu", devices=2)`: ranks on chips of a stand-in, which is compared with the wheel."""

from __future__ import annotations

import ast
import inspect
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

from lightning_diloco.strategy.backends.torch_tpu import NEEDED
from tests.alive import is_running
from tests.devices import fake_tpu
from tests.e2e.conftest import until

ROOT = Path(__file__).parents[3]
needs_stand_in = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no interface for back ends written in Python",
)
pytestmark = pytest.mark.slow


class Host:
    """A host with four chips; learners run in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "learner"
        self.folder.mkdir()
        chips = fake_tpu.make_chips(folder / "chips", 4)
        self.environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FAKE_CHIPS": str(chips)}

    def start(self, *options: str, launcher: tuple[str, ...] = (), **environ: str) -> subprocess.Popen[str]:
        """Start a learner."""
        return subprocess.Popen(
            [sys.executable, *launcher, "-m", "tests.strategy.backends.chips_trainer", *options],
            cwd=self.folder, env={**self.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    def until_all_train(self) -> list[int]:
        """Wait until each of two ranks has trained for some steps, and return their pids."""
        paths = [self.folder / f"training-{rank}" for rank in range(2)]
        until(lambda: all(path.exists() and path.read_text() for path in paths), "steps of all ranks")
        return [int(path.read_text()) for path in paths]

    def ranks(self) -> list[dict[str, Any]]:
        """Return the results of the ranks, in order."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank-*.json"))]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def ended(process: subprocess.Popen[str]) -> str:
    """Wait for a learner, and return its output."""
    output, _ = process.communicate(timeout=120)
    return output


@needs_stand_in
def test_two_chips_are_one_learner(host: Host) -> None:
    learner = host.start()
    output = ended(learner)
    assert learner.returncode == 0, output
    assert output.count("started a syncer for this run") == 1
    ranks = host.ranks()
    assert len(ranks) == 2
    assert ranks[0] == ranks[1], "all ranks have the anchor"
    assert ranks[0].pop("factors") == pytest.approx([3] * 4, abs=0.1)
    assert ranks[0] == {"final class": "DDPDiLoCo", "is sharded": False, "backend": "tpu_dist"}


@needs_stand_in
def test_two_chips_share_a_model(host: Host) -> None:
    learner = host.start("--inner", "fsdp2")
    output = ended(learner)
    assert learner.returncode == 0, output
    ranks = host.ranks()
    assert [found["is sharded"] for found in ranks] == [True] * 2
    assert [len(found["factors"]) for found in ranks] == [2, 2]
    assert ranks[0]["factors"] + ranks[1]["factors"] == pytest.approx([3] * 4, abs=0.1)


@needs_stand_in
def test_one_chip_needs_no_additional_process(host: Host) -> None:
    learner = host.start("--devices", "1")
    output = ended(learner)
    assert learner.returncode == 0, output
    (found,) = host.ranks()
    assert (found["final class"], found["backend"]) == ("SingleDeviceDiLoCo", None)


@needs_stand_in
def test_control_a_chip_that_the_first_process_uses_is_not_available_to_a_rank(host: Host) -> None:
    learner = host.start("--touch")
    output = ended(learner)
    assert learner.returncode == 1
    assert "is used by another process" in output


@needs_stand_in
def test_ranks_of_torchrun(host: Host) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    learner = host.start(launcher=torchrun)
    output = ended(learner)
    assert learner.returncode == 1
    assert f"started as a rank without {' and '.join(NEEDED)}" in output
    assert not host.ranks()
    learner = host.start(launcher=torchrun, **dict.fromkeys(NEEDED, "given"))
    output = ended(learner)
    assert learner.returncode == 0, output
    assert len(host.ranks()) == 2


@needs_stand_in
def test_a_killed_rank_ends_the_learner(host: Host) -> None:
    learner = host.start("--steps", "-1")
    pids = host.until_all_train()
    assert learner.pid not in pids
    os.kill(pids[1], signal.SIGKILL)
    output = ended(learner)
    assert learner.returncode in (1, 128 + signal.SIGKILL)
    assert "another rank of this learner has ended" in output
    assert not any(map(is_running, pids))


@needs_stand_in
def test_sigterm_reaches_the_ranks(host: Host) -> None:
    learner = host.start("--steps", "-1")
    host.until_all_train()
    learner.terminate()
    output = ended(learner)
    assert learner.returncode == 143, output


@needs_stand_in
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--devices", "3"), "3 chip(s) on each of 1 host(s): torch_tpu cannot start such ranks"),
        (("--devices", "5"), "must be a number from 1 to 4, the number of tpu devices here"),
        (("--inner", "spawn"), "inner with start_method='spawn' on tpu: must be 'popen'"),
    ],
)
def test_invalid_devices_and_options_are_refused(host: Host, options: tuple[str, ...], problem: str) -> None:
    learner = host.start(*options)
    output = ended(learner)
    assert learner.returncode == 1
    assert problem in " ".join(output.split())
    assert not host.ranks()


class Wheel:
    """The sources of torch_tpu, from the wheel that TORCH_TPU_WHEEL names."""

    def __init__(self, path: Path) -> None:
        self._files = zipfile.ZipFile(path)

    def text(self, name: str) -> str:
        """A source file."""
        return self._files.read(f"torch_tpu/{name}").decode()

    def functions(self, name: str) -> dict[str, ast.FunctionDef]:
        """Return the functions of a source file by name; of several with one name, the last."""
        return {it.name: it for it in ast.walk(ast.parse(self.text(name))) if isinstance(it, ast.FunctionDef)}

    def methods(self, name: str, of: str) -> dict[str, ast.FunctionDef]:
        """Return the methods of a class of a source file by name."""
        classes = (it for it in ast.walk(ast.parse(self.text(name))) if isinstance(it, ast.ClassDef))
        found = next(it for it in classes if it.name == of)
        return {it.name: it for it in found.body if isinstance(it, ast.FunctionDef)}


@pytest.fixture(scope="module")
def wheel() -> Wheel:
    if (path := os.environ.get("TORCH_TPU_WHEEL")) is None:
        pytest.skip("TORCH_TPU_WHEEL names no wheel; pip download --no-deps torch_tpu==0.2.0")
    return Wheel(Path(path))


def internal(function: ast.FunctionDef) -> str | None:
    """Return the replacement that the wheel names for a function that only torch may call."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "attr", "") == "internal_or_experimental":
            return next(it.value.value for it in decorator.keywords if it.arg == "prefer")  # type: ignore[attr-defined]
    return None


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the names of a function's parameters, without those that stand for an object or a class."""
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return [it.arg for it in arguments if it.arg not in ("self", "cls")]


def test_streams_and_events_have_the_signatures_of_the_wheel(wheel: Wheel) -> None:
    module = wheel.functions("_internal/device/_device_module.py")
    for name, ours in (("Stream", fake_tpu.Stream), ("Event", fake_tpu.Event), ("stream", fake_tpu.stream)):
        assert list(inspect.signature(ours).parameters) == parameters(module[name]), name
    for ours in (fake_tpu.Stream, fake_tpu.Event):
        theirs = wheel.methods("_internal/stream/streams.py", f"Tpu{ours.__name__}")
        for name in vars(ours).keys() - {"__init__"}:
            if inspect.isfunction(method := getattr(ours, name)):
                assert list(inspect.signature(method).parameters)[1:] == parameters(theirs[name]), name


def test_streams_cannot_be_queried_in_the_wheel(wheel: Wheel) -> None:
    query = wheel.methods("_internal/stream/streams.py", "TpuStream")["query"]
    assert ast.unparse(query.body[-1]).startswith("raise NotImplementedError"), "so one queue is found"


def test_the_stand_in_is_as_strict_as_the_wheel(wheel: Wheel) -> None:
    theirs = wheel.functions("_internal/device/_device_module.py")
    strict = {name: instead for name, it in theirs.items() if (instead := internal(it)) is not None}
    assert strict == fake_tpu.INSTEAD
    for name in strict:
        assert list(inspect.signature(getattr(fake_tpu, name)).parameters) == parameters(theirs[name]), name


def test_ranks_are_launched_as_the_wheel_requires(wheel: Wheel) -> None:
    launch = wheel.functions("_internal/distributed/distributed.py")["set_tpu_launch_env"].args
    assert not launch.args
    ours = inspect.signature(fake_tpu.set_tpu_launch_env).parameters.values()
    assert [it.name for it in ours] == [it.arg for it in launch.kwonlyargs]
    assert {it.kind for it in ours} == {inspect.Parameter.KEYWORD_ONLY}
    for name in NEEDED:
        assert name in wheel.text("_internal/distributed/distributed.py")
    assert '"torch.tpu.distributed": ModuleSpec(' in (exports := wheel.text("_internal/public_api.py"))
    assert '"torch_tpu._internal.distributed.distributed:set_tpu_launch_env"' in exports
    assert 'main="torch_tpu._internal.distributed.distributed"' in exports, "python -m torch.tpu.distributed"
    assert '"tpu_dist", tpu_distributed.create_process_group, devices=["tpu"]' in wheel.text("_loader.py")
