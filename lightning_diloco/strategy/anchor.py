"""Loads the anchor of a stopped, crashed or finished run into a module.

1. The anchor is read from the syncer's snapshot and log as after a restart, so it equals the run's anchor bit for bit.
   The run must be stopped or finished; if a syncer still runs, an error says so. Reading takes as much memory as the
   syncer, 15 bytes per parameter, in addition to the memory of the model.
2. Names and shapes are compared with the run's manifest, and frozen parameters (the base of a LoRA) with its digests:
   the module must be the run's model. The anchor holds no buffers, such as the statistics of a BatchNorm, and no copies
   of trained parameters (a teacher).
3. Values take the dtype and the device of the parameters.

Source: our choice.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_diloco.core.fragments import scatter
from lightning_diloco.errors import ConfigError, CorruptLogError, InUseError, PlanMismatchError, StorageError
from lightning_diloco.manifest import check_model, plan_of
from lightning_diloco.strategy.recovery.own_state import copies_of_trained
from lightning_diloco.strategy.trainer.parameters import describe, named_values, trainable_parameters
from lightning_diloco.syncer.anchors import AnchorStore
from lightning_diloco.syncer.shards.whole import read_run
from lightning_diloco.transport.base import Json


def load_anchor(run_dir: str | os.PathLike[str], module: nn.Module) -> None:
    """Load the anchor of a stopped or finished run into the module that it trained.

    Args:
        run_dir: RUN_DIR; if a script started a syncer of its own, `default_root_dir/diloco/<time>`.
        module: the LightningModule, made as for training; its trainable parameters are set, its buffers are left alone.

    Raises:
        ConfigError: this is no run directory, or the run has no values yet.
        PlanMismatchError: the module is not the run's model, or its frozen parameters differ.
        InUseError: a syncer works in the directory, or another command reads it.
        StorageError: its files cannot be read.
    """
    manifest, store = read_anchor(Path(run_dir))
    put_anchor(module, manifest, store)


def read_anchor(run_dir: Path) -> tuple[Json, AnchorStore]:
    """Return the manifest and the anchors of a stopped run, as a restarted syncer would find them.

    Raises:
        ConfigError: this is no run directory, or the run has no values yet.
        InUseError: a syncer works in it, or another command reads it.
        CorruptLogError: the files are damaged.
    """
    if not (run_dir / "syncer" / "log").is_dir():
        raise ConfigError(f"{run_dir} has no syncer/log: no syncer ever ran there; give the RUN_DIR of a run")
    try:
        state, store = read_run(run_dir)
    except CorruptLogError:
        raise
    except InUseError as error:
        raise InUseError(
            f"{run_dir} is in use: its syncer runs, or another command reads it; wait for its end or stop it; "
            "`diloco snapshot` copies a running one"
        ) from error
    except StorageError as error:
        raise StorageError(f"{run_dir} cannot be read: {error}") from error
    if store is None or state.manifest is None:
        raise ConfigError(f"the run in {run_dir} has no start values yet: nothing was trained; let a learner join")
    return state.manifest, store


def put_anchor(module: nn.Module, manifest: Json, store: AnchorStore) -> None:
    """Put the published values into a module's parameters.

    Args:
        module: module of the run's model.
        manifest: manifest of the run.
        store: anchors of the run.

    Raises:
        PlanMismatchError: the module is not the run's model, or its frozen values differ.
    """
    params = trainable_parameters(module, manifest["shapes"])
    mine = replace(describe(module, None, params=params), copies=copies_of_trained(module, params))
    check_model(mine, manifest)
    frozen = manifest["frozen"]
    confirmed = mine.confirmed(frozen)
    odd = sorted(name for name in frozen if confirmed.get(name) != frozen[name])
    if odd:
        raise PlanMismatchError(
            f"{len(odd)} frozen values are not those of the run, such as {odd[0]}: they must be equal; make the module "
            "with the configuration, and the pretrained weights, that the run was started with"
        )
    plan, config = plan_of(manifest)
    values = named_values(plan, config.block_size, params, lambda p: store.anchor(p).published)
    with torch.no_grad():
        for name, value in values.items():
            params[name].copy_(value)


def anchor_values(manifest: Json, store: AnchorStore) -> dict[str, Tensor]:
    """Return the published values as new float32 tensors on the host, by their names in the LightningModule."""
    plan, config = plan_of(manifest)
    tensors = {name: torch.empty(shape) for name, shape in plan.shapes.items()}
    for fragment in range(plan.num_fragments):
        scatter(plan.layout(fragment, config.block_size), store.anchor(fragment).published, tensors)
    return tensors
