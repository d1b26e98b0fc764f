"""The package neither reads nor writes pickles, directly or through libraries, because a pickle can run any code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("lightning_diloco", "recipes") for path in (ROOT / folder).rglob("*.py"))
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
CALLS = {
    *("torch.load", "torch.save", "np.load", "numpy.load", "np.save", "numpy.save", "pd.read_pickle"),
    *("torch.distributed.all_gather_object", "torch.distributed.broadcast_object_list"),
}
ARGUMENTS = {("weights_only", False), ("allow_pickle", True), ("trust_remote_code", True)}


def pickles(source: str) -> Iterator[str]:
    """Return all uses of pickles in a source."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield module
            case ast.ImportFrom(module="torch", names=names):
                yield from (f"torch.{name.name}" for name in names if f"torch.{name.name}" in CALLS)
            case ast.Attribute() if (name := ast.unparse(node)) in CALLS:
                yield name
            case ast.keyword(arg=str(name), value=ast.Constant(value=value)) if (name, value) in ARGUMENTS:
                yield f"{name}={value}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_there_is_no_pickle(path: Path) -> None:
    assert list(pickles(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from dill import loads",
        "import torch\ntorch.load('x')",
        "from torch import save",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "load(path, weights_only=False)",
    ],
)
def test_a_pickle_is_detected(source: str) -> None:
    assert list(pickles(source))
