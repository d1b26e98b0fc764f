"""The wheel works in a separate installation, without this checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def run(*words: object, cwd: Path) -> str:
    """Run a command, which must succeed; return its output."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DILOCO_JOIN")}
    env |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cwd / "cache"), "NO_COLOR": "1", "COLUMNS": "200"}
    argv = [str(word) for word in words]
    ended = subprocess.run(argv, check=False, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of commands of an environment with the wheel; its dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    (wheel,) = built.glob("*.whl")
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    run(sys.executable, "-m", "pip", "--python", folder, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    # Plain paths, because their .pth files are not read. So the new environment does not find this checkout.
    needed = [path for path in sys.path if path.endswith("site-packages")]
    (Path(paths["purelib"]) / "needed.pth").write_text("\n".join(needed))
    return Path(paths["scripts"])


def test_twine_accepts_the_distributions(built: Path) -> None:
    said = run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)
    assert said.count("PASSED") == 2


def test_the_wheel_has_types_and_recipes_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"lightning_diloco/py.typed", "lightning_diloco/recipes/tiny/gpt.yaml"} <= set(names)
    assert {name.partition("/")[0] for name in names} == {"lightning_diloco", "lightning_diloco-0.1.0.dist-info"}
    assert [name for name in names if "__pycache__" in name] == []


def test_the_installed_wheel_lists_its_recipes_and_runs_one(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import lightning_diloco as l; print(l.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert "tiny/gpt" in run(installed / "diloco", "ls", cwd=tmp_path)
    run(installed / "diloco", "run", "tiny/gpt", "--local", 2, "--trainer.max_steps", 30, cwd=tmp_path)
    (summary,) = tmp_path.glob("runs/gpt-*/summary.json")
    assert json.loads(summary.read_text())["status"] == "finished"
