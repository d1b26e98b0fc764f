"""Takes and restores the part of an optimizer's state that this process holds; nothing is gathered.

1. The local part of a sharded value is kept if the value is sharded like its parameter. Other values (row and column
   statistics, for example) cannot be kept; storing the state raises an error that names them.
2. The state of an optimizer that shards it over ranks (ZeroRedundancyOptimizer) cannot be kept without a gather.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_diloco.strategy.trainer.parameters import optimizer_parameters

State = dict[str, Any]

SHARDED = "sharded"


def held(optimizer: Optimizer) -> State:
    """Return the state of an optimizer as plain values and tensors, which may be the live ones.

    A value that cannot be kept is replaced by an object that cannot be stored.
    """
    if hasattr(optimizer, "consolidate_state_dict"):
        return {"state": optimizer}
    state, params = optimizer.state_dict(), optimizer_parameters(optimizer)
    sharded = [
        (index, key)
        for index, values in state["state"].items()
        for key, value in values.items()
        if isinstance(value, DTensor)
    ]
    if not sharded:
        return state
    values = {index: dict(values) for index, values in state["state"].items()}
    for index, key in sharded:
        values[index][key] = _local(values[index][key], params[index])
    return {**state, "state": values, SHARDED: sharded}


def give(optimizer: Optimizer, state: State, device: torch.device) -> None:
    """Load a state of `held` into an optimizer of the same parameters with the same layout."""
    state, params = (
        {**state, "state": {index: dict(values) for index, values in state["state"].items()}},
        optimizer_parameters(optimizer),
    )
    for index, key in state.pop(SHARDED, ()):
        state["state"][index][key] = _like(state["state"][index][key], params[index])
    optimizer.load_state_dict(state)
    _optimizer_to_device(optimizer, device)


def _local(value: DTensor, param: Tensor) -> object:
    if isinstance(param, DTensor) and (value.shape, value.placements) == (param.shape, param.placements):
        return value.to_local()
    return value.placements


def _like(value: Tensor, param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    local = value.to(param.to_local().device)
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())
