"""Checks whether a recipe's language model fits this machine, before anything is loaded.

1. Learners on CPUs and the syncer share the machine's memory, or the container's limit. A learner on GPUs needs its
   share of the model on each GPU. A GPU without memory of its own (Apple's) uses that of the machine.
2. Only models of `lightning_diloco.hf` are checked. The check builds the model, and building any other model twice may
   have side effects. A model whose vocabulary size needs a tokenizer download is not checked either.
3. The check counts the same memory as `diloco plan`. A model just below the limit may still fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_diloco.cli.plan import scenario_of
from lightning_diloco.errors import ConfigError
from lightning_diloco.hf.blueprint import Blueprint, blueprint, can_be_built, is_language_model
from lightning_diloco.planner.memory import Items
from lightning_diloco.planner.plan import Forecast, forecast, gib
from lightning_diloco.process.machine import memory_here

ON_GPU = ("gpu", "cuda", "auto", "torch")
"""Names for `Trainer(accelerator=...)` that use the GPU of this machine, if there is one."""


def check_room(recipe: Path, config: Any, num_here: int) -> None:
    """Refuse a model that cannot fit.

    Args:
        recipe: path of the recipe, for messages.
        config: the parsed recipe.
        num_here: number of learners on this machine.

    Raises:
        ConfigError: the model needs more memory than is available.
    """
    if not is_language_model(config) or not can_be_built(config):
        return
    drawn = blueprint(config)
    found = forecast(scenario_of(drawn, {"num_learners": num_here}))
    of_gpu = _memory_of_gpu(drawn)
    if of_gpu is not None:
        needed, there = sum(found.device.values()), of_gpu
        what = f"each device of a learner needs {_said(found.device)}"
    else:
        num_hosts = config["trainer"].get("num_nodes") or 1
        needed, there = _needed_together(found, num_here, num_hosts), memory_here()
        what = f"{num_here} learner(s) and a syncer need {gib(needed)}: {_parts(found)}"
    if needed > there:
        raise ConfigError(
            f"{recipe} does not fit this machine: {what}; there are {gib(there)} "
            f"{'of memory' if of_gpu is None else 'on the device'}; use a smaller model or a larger machine; "
            f"`diloco plan {recipe}` shows what it needs"
        )


def _memory_of_gpu(drawn: Blueprint) -> int | None:
    """Return the memory of the first GPU; None if the learner trains on none, or if it has no memory of its own."""
    if drawn.accelerator not in ON_GPU or not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    properties = getattr(torch.get_device_module(kind), "get_device_properties", None)
    return None if properties is None else getattr(properties(0), "total_memory", None)


def _needed_together(found: Forecast, num_here: int, num_hosts: int) -> int:
    each = found.scenario.training.devices // num_hosts * sum(found.device.values()) + sum(found.host.values())
    return num_here * each + sum(found.syncer.values())


def _parts(found: Forecast) -> str:
    return f"each learner {_said(found.device)} and {_said(found.host)} for its host, the syncer {_said(found.syncer)}"


def _said(items: Items) -> str:
    largest = sorted(items, key=lambda name: -items[name])[:3]
    return f"{gib(sum(items.values()))} ({', '.join(f'{name} {gib(items[name])}' for name in largest)} ...)"
