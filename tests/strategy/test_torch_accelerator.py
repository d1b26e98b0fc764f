"""`Trainer(accelerator="torch")`, without such a device; tests/devices/late_checks.py trains on a stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.backends.torch_accelerator import TorchAccelerator
from lightning_diloco.tpu import TorchTPUAccelerator


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with four devices of a type for which Lightning has no class; the current device is the third."""
    found = {
        "current_accelerator": lambda: torch.device("xpu"),
        "is_available": lambda: True,
        "device_count": lambda: 4,
        "current_device_index": lambda: 2,
    }
    for name, call in found.items():
        monkeypatch.setattr(torch.accelerator, name, call)
    return "xpu"


@pytest.mark.parametrize(
    ("devices", "indices"),
    [(1, [2]), ("1", [2]), (4, [0, 1, 2, 3]), (-1, [0, 1, 2, 3]), ([3], [3]), ("1,3", [1, 3]), ("-1", [0, 1, 2, 3])],
)
@pytest.mark.usefixtures("kind")
def test_requested_devices_are_parsed(devices: int | str | list[int], indices: list[int]) -> None:
    assert TorchAccelerator.parse_devices(devices) == indices
    assert TorchAccelerator.get_parallel_devices(indices) == [torch.device("xpu", k) for k in indices]


@pytest.mark.parametrize("devices", [0, 5, -2, [4], [1, 1], [], "all", ""])
@pytest.mark.usefixtures("kind")
def test_missing_devices_are_refused(devices: int | str | list[int]) -> None:
    with pytest.raises(ConfigError, match=r"must be a number from 1 to 4, the number of xpu devices here"):
        TorchAccelerator.parse_devices(devices)


@pytest.mark.usefixtures("kind")
def test_a_device_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="device cpu: must be of type xpu"):
        TorchAccelerator().setup_device(torch.device("cpu"))


@pytest.mark.parametrize("accelerator", ["torch", "torch_tpu"])
def test_a_machine_without_an_accelerator_is_refused(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(MisconfigurationException, match="can not run on your system"):
        L.Trainer(accelerator=accelerator, devices=1)


@pytest.mark.usefixtures("kind")
def test_only_tpus_count_as_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchAccelerator.is_available()
    assert not TorchTPUAccelerator.is_available()
    tpu = SimpleNamespace(type="tpu")  # torch knows the type only if torch_tpu is installed
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: tpu)
    assert TorchTPUAccelerator.is_available()


@pytest.mark.usefixtures("kind")
def test_each_rank_uses_the_first_chip_of_its_process() -> None:
    assert TorchTPUAccelerator.parse_devices(4) == TorchTPUAccelerator.parse_devices("-1") == [0, 0, 0, 0]
    with pytest.raises(ConfigError, match=r"devices=\[1\]: must be a number of chips.*TPU_VISIBLE_CHIPS"):
        TorchTPUAccelerator.parse_devices([1])
    with pytest.raises(ConfigError, match="must be a number from 1 to 4"):
        TorchTPUAccelerator.parse_devices(5)


def test_mixed_precision_is_that_of_the_device(kind: str) -> None:
    trainer = L.Trainer(
        accelerator="torch",
        devices=1,
        strategy=DecoupledDiLoCoStrategy(),
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
    )
    precision = trainer.strategy.precision_plugin
    assert trainer.strategy.root_device == torch.device(kind, 2)
    assert isinstance(precision, MixedPrecision)
    assert precision.device == kind
