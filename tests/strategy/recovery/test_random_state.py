"""Random states in a learner's checkpoint."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_diloco.strategy.recovery.trainer_state import random_state, restore_random_state

CPU, MPS = torch.device("cpu"), torch.device("mps")


def drawn() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.random())]


def test_generators_continue_where_they_were() -> None:
    state = random_state(CPU)
    first = drawn()
    assert drawn() != first
    restore_random_state(state, CPU)
    assert drawn() == first


def test_the_generator_of_another_accelerator_continues_too(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    module = SimpleNamespace(get_rng_state=generator.get_state, set_rng_state=generator.set_state)
    monkeypatch.setattr(torch, "get_device_module", lambda device: {"mps": module}[device.type])
    state = random_state(MPS)
    first = torch.rand(3, generator=generator)
    restore_random_state(state, MPS)
    assert torch.equal(torch.rand(3, generator=generator), first)
    restore_random_state(random_state(CPU), MPS)
    assert not torch.equal(torch.rand(3, generator=generator), first), "a CPU's checkpoint has no state for it"


def test_a_device_without_generators_of_its_own_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    state = random_state(MPS)
    assert state["device"] is None
    restore_random_state(state, MPS)
