"""Packaging metadata is correct: dependencies, pins, console script, version and licence."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_diloco

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it on these versions, too

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = [Requirement(line) for line in PROJECT["dependencies"]]
TEST = [Requirement(line) for line in PROJECT["optional-dependencies"]["test"]]


def pins() -> dict[str, str]:
    """Return the versions in the constraints file, by canonical name."""
    lines = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines if not line.startswith("#")]
    assert all(found), f"only NAME==VERSION is allowed: {lines}"
    return {canonicalize_name(match[1]): match[2] for match in found if match}


@pytest.mark.parametrize("requirement", CORE, ids=lambda requirement: requirement.name)
def test_core_dependency_is_importable_in_an_allowed_version(requirement: Requirement) -> None:
    importlib.import_module(requirement.name.replace("-", "_"))
    version = importlib.metadata.version(requirement.name)
    assert requirement.specifier.contains(version, prereleases=True), f"{requirement.name} {version}"


@pytest.mark.parametrize("requirement", CORE + TEST, ids=lambda requirement: requirement.name)
def test_tested_version_of_each_dependency_is_pinned_and_allowed(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_console_script_resolves_to_a_function() -> None:
    module, _, name = PROJECT["scripts"]["diloco"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == lightning_diloco.__version__
    assert f"## [{lightning_diloco.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_licence_file_is_the_declared_one() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text(encoding="utf-8")
