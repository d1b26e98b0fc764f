"""The structure of the package, checked in its source.

1. LAYERS is ordered from the top: a module imports from its own layer and from lower ones, never from a neighbour
   behind a bar. Imports inside functions and under TYPE_CHECKING count.
2. NARROWER lists layers that may use only some of the lower layers. LIBRARIES lists the external packages of each
   layer.
3. Only `cli` prints. Environment variables are those of `lightning_diloco.environment`, read only in the modules listed
   there.
4. No module imports itself through others, and no folder has more than twenty modules.
5. Every module has a docstring, and everything in an `__all__` exists (this one imports the modules that have one).
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from lightning_diloco.environment import VARIABLES, WHOLE_IN

PACKAGE = "lightning_diloco"
ROOT = Path(__file__).parents[1] / PACKAGE
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}

LAYERS = (
    "cli > __init__ > runs | tpu > live | tracking | hf | plots | simulate | planner > strategy > learner | syncer"
    " > manifest > storage > devices | transport > protocol | core | process > config | environment > errors"
    " | pytorch_lightning"
)
NARROWER = {
    "simulate": "core protocol config errors",
    "planner": "core config errors",
    "storage": "transport protocol core process config environment errors",
    "process": "config errors",
    "devices": "core config errors",
    "transport": "protocol config errors",
    "protocol": "config errors",
    "core": "config errors",
}
LIBRARIES = {
    "cli": "lightning rich yaml packaging torch",
    "cli/faults/picture.py": "matplotlib",
    "cli/ray/cluster.py": "ray",
    "cli/ray/host.py": "ray",
    "protocol": "msgspec",
    "simulate": "msgspec",
    "runs": "pyarrow torch",
    "live": "prometheus_client",
    "tracking": "torch lightning wandb",
    "hf": "torch lightning torchmetrics transformers datasets tokenizers filelock peft safetensors",
    "plots": "matplotlib",
    "strategy": "torch lightning numpy typing_extensions",
    "learner": "torch msgspec",
    "syncer": "torch msgspec",
    "syncer/contribution_archive.py": "torch safetensors",
    "manifest": "torch",
    "storage": "torch safetensors fsspec msgspec",
    "process": "torch",
    "devices": "torch",
    "devices/xla/ops.py": "torch torch_xla",
    "transport": "pyarrow cryptography msgspec",
    "transport/portions.py": "torch",
    "core": "torch numpy",
    "core/kernels.py": "numba numpy",
    "core/fused_kernels.py": "torch triton",
}
WHOLE = "the whole environment"


def layer_of(where: str) -> str:
    """Return the layer of a path or of a dotted name below the package."""
    return where.replace("/", ".").removesuffix(".py").partition(".")[0]


def below() -> dict[str, set[str]]:
    """Return the layers that each layer may import, including itself."""
    allowed: dict[str, set[str]] = {}
    for level in reversed(LAYERS.split(" > ")):
        lower = set(allowed)
        for layer in level.split(" | "):
            allowed[layer] = {layer} | (set(NARROWER[layer].split()) if layer in NARROWER else lower)
    return allowed


def imported(tree: ast.Module) -> Iterator[str]:
    """Return the dotted names of all imports in a module; `from package import name` counts as package.name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            yield from (f"{source}.{alias.name}" for alias in node.names)


def import_offences(where: str, source: str) -> list[str]:
    """Return the imports of a module that its layer may not use."""
    layer, allowed = layer_of(where), below()
    if layer not in allowed:
        return [f"{where} is in no layer: add {layer!r} to LAYERS"]
    libraries = set(LIBRARIES.get(where, LIBRARIES.get(layer, "")).split()) | sys.stdlib_module_names
    offences = []
    for name in imported(ast.parse(source)):
        top, _, rest = name.partition(".")
        inner = layer_of(rest) if layer_of(rest) in allowed else "__init__"
        if not top:
            offences.append(f"{where} imports {name}: relative, say {PACKAGE}...")
        elif top == PACKAGE and inner not in allowed[layer]:
            offences.append(f"{where} imports {name}: {layer} may not use {inner}")
        elif top != PACKAGE and top not in libraries:
            offences.append(f"{where} imports {name}: {layer} may not use {top}")
    return offences


def circles(sources: Mapping[str, str]) -> list[list[str]]:
    """Return modules that import each other, directly or through others."""
    names = {where.removesuffix(".py").removesuffix("/__init__").replace("/", "."): where for where in sources}
    below = {where: {names[m] for m in _modules(source, names)} - {where} for where, source in sources.items()}
    while leaves := [where for where, lower in below.items() if not lower & below.keys()]:
        for where in leaves:
            del below[where]
    return [sorted(below)] if below else []


def _modules(source: str, names: Mapping[str, str]) -> Iterator[str]:
    for full in imported(ast.parse(source)):
        name = full.removeprefix(f"{PACKAGE}.")
        found = name if name in names else name.rpartition(".")[0]  # the module of a name in it
        if full.startswith(PACKAGE) and found in names:
            yield found


def print_offences(where: str, source: str) -> list[str]:
    """Return calls of `print` outside `cli`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    prints = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    return [f"{where}:{line} prints" for line in prints if layer_of(where) != "cli"]


def environment_reads(source: str) -> set[str]:
    """Return the variables that a module reads by name; WHOLE if it reads all, writes one or computes a name."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    return {_variable(node, parents) for node in ast.walk(tree) if _is_environment(node)}


def _is_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "putenv"}
    return (isinstance(node, ast.Attribute) and node.attr in names) or (
        isinstance(node, ast.ImportFrom) and node.module == "os" and any(alias.name in names for alias in node.names)
    )


def _variable(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    """Return the constant in `environ.get(X)`, `getenv(X)`, `environ[X]` (read) or `X in environ`."""
    name: ast.AST | None = None
    match parents.get(node):
        case ast.Attribute(attr="get") as get:
            node = get
        case ast.Subscript(slice=name, ctx=ast.Load()) | ast.Compare(left=name, ops=[ast.In() | ast.NotIn()]):
            pass
    match parents.get(node):
        case ast.Call(func=called, args=[first, *_]) if called is node:
            name = first
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else WHOLE


def missing_names(module: ModuleType) -> list[str]:
    """Return names in `__all__` that the module does not have, not even lazily."""
    return [name for name in module.__all__ if not hasattr(module, name)]


@pytest.mark.parametrize("where", SOURCES)
def test_imports_point_down(where: str) -> None:
    assert import_offences(where, SOURCES[where]) == []


@pytest.mark.parametrize(
    ("where", "source", "offender"),
    [
        ("protocol/learner/machine.py", "import torch", "torch"),
        ("protocol/learner/machine.py", "from lightning_diloco.core import merge", "core"),
        ("core/merge.py", "from lightning_diloco.protocol.events import Ready", "protocol"),
        ("core/merge.py", "import numba", "numba"),
        ("config.py", "import yaml", "yaml"),
        ("config.py", "from lightning_diloco.environment import VARIABLES", "environment"),
        ("errors.py", "from lightning_diloco import config", "config"),
        ("transport/flight.py", "from lightning_diloco.core.merge import merge_fragment", "core"),
        ("transport/flight.py", "from lightning_diloco.devices import device_for", "devices"),
        ("devices/dense.py", "from lightning_diloco.learner.link import Link", "learner"),
        ("devices/dense.py", "def f():\n    import torch_xla.core as xla", "torch_xla"),
        ("learner/link.py", "if TYPE_CHECKING:\n    from lightning_diloco.strategy.hooks import Hooks", "strategy"),
        ("learner/link.py", "import lightning_diloco.cli.main", "cli"),
        ("learner/link.py", "from lightning_diloco import __version__", "__init__"),
        ("simulate/fleet.py", "from lightning_diloco.transport.flight_client import FlightConnection", "transport"),
        ("strategy/hooks.py", "import transformers.utils", "transformers"),
        ("strategy/hooks.py", "from . import data", "relative"),
        ("extra/thing.py", "", "extra"),
    ],
)
def test_an_import_that_points_up_or_outside_is_detected(where: str, source: str, offender: str) -> None:
    (offence,) = import_offences(where, source)
    assert offender in offence


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("cli/run.py", "from lightning_diloco.syncer.process import serve\nimport rich.table"),
        ("cli/run.py", "from lightning_diloco import __version__, errors"),
        ("__init__.py", "from lightning_diloco.strategy.decoupled import DecoupledDiLoCoStrategy"),
        ("learner/link.py", "from lightning_diloco import errors, protocol"),
        ("devices/xla/ops.py", "import torch_xla"),
    ],
)
def test_an_import_that_points_down_is_allowed(where: str, source: str) -> None:
    assert import_offences(where, source) == []


def test_one_file_calls_torch_tpu() -> None:
    names = {where: [*imported(ast.parse(source))] for where, source in SOURCES.items()}
    users = [where for where, found in names.items() if any(it.startswith(("torch_tpu", "torch.tpu")) for it in found)]
    assert users == ["strategy/backends/torch_tpu.py"]


@pytest.mark.seconds
def test_no_module_imports_itself_through_others() -> None:
    assert circles(SOURCES) == []


def test_a_circular_import_is_detected() -> None:
    a, b = "from lightning_diloco.b import x", "def f():\n    from lightning_diloco import a"
    assert circles({"a.py": a, "b.py": b, "c.py": a}) == [["a.py", "b.py", "c.py"]]


def test_no_folder_has_more_than_twenty_modules() -> None:
    folders = Counter(where.rpartition("/")[0] for where in SOURCES if not where.endswith("__init__.py"))
    assert {folder: count for folder, count in folders.items() if count > 20} == {}


def test_narrower_layers_still_point_down() -> None:
    full = {layer: level for level, layers in enumerate(LAYERS.split(" > ")) for layer in layers.split(" | ")}
    upward = [(high, low) for high, allowed in NARROWER.items() for low in allowed.split() if full[low] <= full[high]]
    assert upward == []


@pytest.mark.seconds
def test_only_the_command_line_prints() -> None:
    assert [offence for where, source in SOURCES.items() for offence in print_offences(where, source)] == []


def test_a_print_outside_the_command_line_is_detected() -> None:
    source = "def f(console):\n    console.print(1)\n    print(2)"
    assert print_offences("learner/link.py", source) == ["learner/link.py:3 prints"]
    assert print_offences("cli/run.py", source) == []


@pytest.mark.seconds
def test_environment_variables_are_read_only_in_the_listed_modules() -> None:
    documented = {(name, where) for name, variable in VARIABLES.items() for where in variable.read_in}
    documented |= {(WHOLE, where) for where in WHOLE_IN}
    assert {(name, where) for where, source in SOURCES.items() for name in environment_reads(source)} == documented


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ('a = os.environ.get("A") or os.getenv("B", "0")', {"A", "B"}),
        ('if "A" not in os.environ or os.environ["B"]: pass', {"A", "B"}),
        ('os.environ["A"] = "1"', {WHOLE}),
        ('os.environ.setdefault("A", "1")', {WHOLE}),
        ("os.environ.get(name)", {WHOLE}),
        ("env = {**os.environ}", {WHOLE}),
        ("from os import environ", {WHOLE}),
        ("x = list(map(os.getenv, names))", {WHOLE}),
        ("import os", set()),
    ],
)
def test_each_way_to_read_the_environment_is_detected(source: str, reads: set[str]) -> None:
    assert environment_reads(source) == reads


def test_every_module_has_a_docstring() -> None:
    assert [where for where, source in SOURCES.items() if not ast.get_docstring(ast.parse(source))] == []


@pytest.mark.parametrize("where", [where for where, source in SOURCES.items() if "\n__all__ = " in source])
def test_every_exported_name_exists(where: str) -> None:
    name = f"{PACKAGE}/{where}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert missing_names(importlib.import_module(name)) == []


def test_an_exported_name_that_does_not_exist_is_detected() -> None:
    module = ModuleType("synthetic")
    module.__dict__.update(__all__=["there", "gone"], there=1)
    assert missing_names(module) == ["gone"]
