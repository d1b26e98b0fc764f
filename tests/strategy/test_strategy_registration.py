"""The name is known in any order of imports, and importing the package loads no large library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_diloco.strategy.registration import ACCELERATORS, accelerator

HEAVY = ("torch", "numpy", "lightning", "lightning_fabric", "pytorch_lightning", "transformers", "pyarrow", "rich")
# A package with Lightning's names, so that import orders are tried in milliseconds.
STAND_IN = """
class _Registry(dict):
    def register(self, name, make, description=None):
        assert name not in self
        self[name] = make
StrategyRegistry = _Registry(other=object)
AcceleratorRegistry = _Registry(xla=object, torch=object, torch_tpu=object)
"""
SHOW = "; import lightning.pytorch.strategies as s; print(sorted(s.StrategyRegistry))"


def python(code: str, folder: Path | None = None) -> str:
    path = [] if folder is None else [str(folder)]
    code = f"import sys; sys.path[:0] = {[*path, *sys.path]!r}; {code}"
    ended = subprocess.run([sys.executable, "-W", "error", "-Sc", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    for package in ("lightning/pytorch", "pytorch_lightning"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("from . import accelerators, strategies")
        for name in ("accelerators", "strategies"):
            (tmp_path / package / f"{name}.py").write_text(STAND_IN)
    (tmp_path / "lightning" / "__init__.py").write_text("from . import pytorch")
    return tmp_path


@pytest.mark.parametrize("name", ["lightning_diloco", "lightning_diloco.cli.main", "lightning_diloco.strategy"])
def test_importing_loads_no_large_library(name: str) -> None:
    assert python(f"import {name}; print(sorted({set(HEAVY)!r} & set(sys.modules)))") == "[]"


@pytest.mark.seconds
def test_the_syncer_imports_only_torch_and_the_transport() -> None:
    code = f"import lightning_diloco.syncer.process; print(sorted({set(HEAVY)!r} & set(sys.modules)))"
    assert python(code) == "['numpy', 'pyarrow', 'torch']"


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning; import lightning_diloco",
        "import lightning_diloco; import lightning",
        "import lightning_diloco; from lightning.pytorch import strategies",
        "import lightning_diloco; del sys.modules['lightning_diloco']; import lightning_diloco; import lightning",
        "import lightning; import lightning_diloco; lightning_diloco.register()",
    ],
)
def test_the_name_is_known_in_any_order(stand_in: Path, imports: str) -> None:
    assert python(imports + SHOW, stand_in) == "['decoupled_diloco', 'other']"


def test_only_the_finder_for_the_other_package_stays_in_the_import_system(stand_in: Path) -> None:
    code = "before = list(sys.meta_path); import lightning_diloco, lightning, pytorch_lightning.strategies as other; "
    code += "left = [type(it).__name__ for it in sys.meta_path if it not in before]; "
    assert python(f"{code}print(left, sorted(other.StrategyRegistry))", stand_in) == (
        "['_Mirror'] ['decoupled_diloco', 'other']"
    )


def test_without_lightning_its_import_fails_normally(tmp_path: Path) -> None:
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").touch()
    code = "import lightning_diloco\ntry:\n  import lightning.pytorch.strategies\nexcept ImportError as e:\n  print(e)"
    assert python(code, tmp_path) == "No module named 'lightning.pytorch'"


def test_unknown_names_of_the_package_are_attribute_errors() -> None:
    import lightning_diloco

    with pytest.raises(AttributeError, match="has no attribute 'Strategy'"):
        _ = lightning_diloco.Strategy
    assert set(lightning_diloco.__all__) <= set(dir(lightning_diloco))


def test_accelerators_are_registered_by_their_names() -> None:
    for name in ACCELERATORS:
        assert accelerator("lightning_diloco", name).name() == name


@pytest.mark.slow
@pytest.mark.parametrize("lightning", ["lightning.pytorch", "pytorch_lightning"])
def test_accelerators_are_those_of_the_package(lightning: str) -> None:
    code = f"import lightning_diloco; from {lightning}.accelerators import Accelerator, AcceleratorRegistry; "
    code += "from lightning_diloco.tpu import TorchTPUAccelerator as ours; "
    code += f"found = [AcceleratorRegistry[name]['accelerator'] for name in {[*ACCELERATORS]}]; "
    assert python(f"{code}print(all(issubclass(it, Accelerator) for it in found), found[-1] is ours)") == "True True"


@pytest.mark.slow
def test_the_class_for_tpus_can_be_imported_first() -> None:
    assert python("from lightning_diloco.tpu import TorchTPUAccelerator as ours; print(ours.name())") == "torch_tpu"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["lightning as L, lightning_diloco", "lightning_diloco, lightning as L"])
def test_a_trainer_finds_the_strategy(order: str) -> None:
    code = (
        f"import warnings; warnings.simplefilter('ignore'); import {order}; "
        "trainer = L.Trainer(strategy='decoupled_diloco', accelerator='cpu', devices=1, logger=False); "
        "print(isinstance(trainer.strategy, lightning_diloco.DecoupledDiLoCoStrategy))"
    )
    assert python(code).endswith("True")
