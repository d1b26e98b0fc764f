"""A model that is too large for this machine is refused before anything is loaded; one that fits is not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_diloco.cli import fit
from lightning_diloco.cli.local import memory_check
from lightning_diloco.errors import ConfigError
from lightning_diloco.hf.recipe import parse
from lightning_diloco.process import machine

RECIPES = Path(__file__).parents[3] / "recipes"
TINY = RECIPES / "tiny" / "gpt.yaml"


def check(recipe: Path, num_here: int, *overrides: str) -> None:
    memory_check.check_room(recipe, parse(recipe, overrides), num_here)


@pytest.mark.seconds
def test_a_small_model_fits() -> None:
    check(TINY, 2)


@pytest.mark.seconds
def test_a_model_whose_tokenizer_needs_a_download_is_not_checked() -> None:
    check(TINY, 1, "--data.init_args.tokenizer", "nobody/nothing")


@pytest.mark.seconds
def test_twelve_billion_parameters_are_refused_with_the_items_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "memory_here", lambda: 64 << 30)
    with pytest.raises(ConfigError) as caught:
        check(RECIPES / "gemma" / "12b-8gpu.yaml", 2, "--trainer.accelerator=cpu", "--trainer.devices=1")
    for part in ("2 learner(s) and a syncer need", "anchors 4", "there are 64.0 GiB of memory", "`diloco plan"):
        assert part in str(caught.value)


@pytest.mark.seconds
def test_every_learner_on_the_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "memory_here", lambda: 0)
    with pytest.raises(ConfigError) as caught:
        check(TINY, 1)
    for_one = float(str(caught.value).split(" MiB")[0].rpartition(" ")[2]) * 2**20
    monkeypatch.setattr(memory_check, "memory_here", lambda: int(1.2 * for_one))
    check(TINY, 1)
    with pytest.raises(ConfigError, match="3 learner"):
        check(TINY, 3)


@pytest.mark.seconds
@pytest.mark.parametrize("accelerator", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_gpu_needs_room_for_one_learner(accelerator: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "memory_here", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    memory = SimpleNamespace(total_memory=1 << 40)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(get_device_properties=lambda _: memory))
    check(TINY, 2, f"--trainer.accelerator={accelerator}")
    memory.total_memory = 1000
    with pytest.raises(ConfigError, match=r"each device of a learner needs .* on the device"):
        check(TINY, 2, f"--trainer.accelerator={accelerator}")
    with pytest.raises(ConfigError, match="2 learner"):
        check(TINY, 2, "--trainer.accelerator=cpu")


@pytest.mark.seconds
def test_a_gpu_without_memory_of_its_own_uses_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "memory_here", lambda: 1000)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    with pytest.raises(ConfigError, match="2 learner"):
        check(TINY, 2, "--trainer.accelerator=auto")


@pytest.mark.seconds
def test_devices_on_other_hosts_of_a_learner_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "memory_here", lambda: 0)

    def needed(*overrides: str) -> float:
        with pytest.raises(ConfigError) as caught:
            check(TINY, 1, *overrides)
        return float(str(caught.value).split(" MiB")[0].rpartition(" ")[2])

    on_two_hosts = needed("--trainer.devices=2", "--trainer.num_nodes=2")
    assert on_two_hosts == pytest.approx(needed("--trainer.devices=2"), rel=0.05)
    assert on_two_hosts < 0.7 * needed("--trainer.devices=4")


def test_the_memory_limit_of_a_container_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_CGROUP_LIMIT", limit)
    physical = memory_check.memory_here()
    limit.write_text("max\n")
    assert memory_check.memory_here() == physical
    limit.write_text("1048576\n")
    assert memory_check.memory_here() == 1 << 20


def test_a_learner_checks_memory_before_it_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_check, "memory_here", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["fit", "--local", "2", str(TINY)])
    assert fit.main() == 2
    assert "2 learner(s) and a syncer need" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "nearest"),
    [("--trainer.max_stepz=3", "max_steps"), ("--modle.lr=3", "model"), ("--model.init_args.lrr=3", "lr")],
)
def test_a_misspelt_override_is_refused_with_the_nearest_name(
    override: str, nearest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fit", str(TINY), override])
    assert fit.main() == 2
    assert f"did you mean '{nearest}'?" in capsys.readouterr().err
