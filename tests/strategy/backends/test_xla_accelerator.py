"""Errors about an environment in which XLA cannot work; these tests do not need torch_xla."""

from __future__ import annotations

import sys
from importlib import metadata

import lightning as L
import pytest

import lightning_diloco  # noqa: F401  registers the accelerator
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.backends import xla_accelerator
from lightning_diloco.strategy.backends.xla_accelerator import check_environment


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(xla_accelerator.metadata, "version", version)


def test_all_problems_of_an_environment_are_reported_at_once(monkeypatch):
    installed(monkeypatch, torch="2.13.0")
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    with pytest.raises(ConfigError) as caught:
        check_environment(needs_platform=True)
    missing, unset = caught.value.problems
    assert "torch_xla is not installed" in missing
    assert "PJRT_DEVICE is not set" in unset


def test_torch_of_another_version_is_refused_before_torch_xla_is_imported(monkeypatch):
    installed(monkeypatch, torch="2.13.0+cpu", torch_xla="2.9.0")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=r"torch 2\.13\.0\+cpu and torch_xla 2\.9\.0 .* 'torch==2\.9\.\*'"):
        check_environment(needs_platform=True)
    assert not {name for name in set(sys.modules) - before if name.startswith("torch_xla")}


def test_the_accelerator_for_tpus_may_leave_the_platform_to_torch_xla(monkeypatch):
    installed(monkeypatch, torch="2.9.1", torch_xla="2.9.0")
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    check_environment(needs_platform=False)


def test_the_accelerator_name_gives_the_reason_instead_of_an_import_error(monkeypatch):
    installed(monkeypatch, torch="2.13.0")
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-diloco\[xla\]'"):
        L.Trainer(accelerator="xla", strategy="decoupled_diloco", logger=False)
