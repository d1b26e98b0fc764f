"""The anchor of a run as files that others open: a transformers folder, and a Lightning checkpoint.

1. The anchor comes from the syncer's own snapshot and log, as after a restart, so it is the run's, bit for bit. The run
   must be stopped or finished: a syncer that still runs holds the log's lock, and that is said. It takes the syncer's
   memory, 15 bytes per parameter, and the model's.
2. What model it is the anchor of: a configuration of LightningCLI. Each learner of a recipe leaves one in its folder
   (config.yaml); any other can be named, for example the recipe itself.
3. Shapes are compared with the run's manifest, and frozen values (a LoRA's base) with its digests: nothing is exported
   that the run did not train. Buffers, and copies of trained parameters, are as the model builds them.
4. Values take the dtype that the parameters had. Tied weights are stored as transformers stores them.
5. An adapter (PEFT) is merged into its base, so that the folder opens by itself; alone it lies in `adapter/`.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as bars

from lightning_diloco.errors import ConfigError, PlanMismatchError, StorageError
from lightning_diloco.hf.blueprint import default_dtype, instantiate
from lightning_diloco.hf.recipe import parse
from lightning_diloco.protocol import SyncerState
from lightning_diloco.runtime.anchors import AnchorStore
from lightning_diloco.runtime.durable import Durable
from lightning_diloco.runtime.manifest import check_model, plan_of
from lightning_diloco.strategy.model import describe, named_values, trainable_parameters
from lightning_diloco.strategy.own_state import copies_of_trained
from lightning_diloco.transport.base import Json

CHECKPOINT = "lightning.ckpt"
ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Args:
        folder: where.
        config: the configuration that described the model.
        is_transformers: False if the module has no transformers model, and only the checkpoint was written.
        has_tokenizer: whether the tokenizer lies beside it.
        versions: of the anchor, per fragment.
    """

    folder: Path
    config: Path
    is_transformers: bool
    has_tokenizer: bool
    versions: tuple[int, ...]


def export(run_dir: Path, folder: Path, *, config: Path | None = None) -> Exported:
    """Write the anchor of a stopped run.

    Args:
        run_dir: RUN_DIR.
        folder: made if it is not there; must not hold anything else.
        config: of LightningCLI; None: the newest that a learner left in RUN_DIR.

    Raises:
        ConfigError: no configuration was found, or the folder is not empty.
        PlanMismatchError: the configuration describes another model than the run's.
        StorageError: the run goes on, or its files cannot be read.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: an export needs a folder of its own; choose another, or empty it")
    config = config or find_config(run_dir)
    manifest, store = read_anchor(run_dir)
    module, tokenizer = _build(config)
    load_anchor(module, manifest, store)
    folder.mkdir(parents=True, exist_ok=True)
    model = getattr(module, "model", None)
    is_transformers = isinstance(model, PreTrainedModel) or hasattr(model, "save_pretrained")
    _save_checkpoint(module, folder / CHECKPOINT)
    if is_transformers:
        _save_transformers(model, tokenizer, folder)
    versions = tuple(store.anchor(p).version for p in range(len(store.layouts)))
    return Exported(folder, config, is_transformers, is_transformers and tokenizer is not None, versions)


def find_config(run_dir: Path) -> Path:
    """The newest configuration that a learner left in a run directory.

    Raises:
        ConfigError: there is none.
    """
    found = sorted((run_dir / "learners").rglob("config.yaml"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(
            f"no config.yaml below {run_dir / 'learners'}: learners were scripts, or their logger wrote elsewhere; "
            "name the recipe with --config (a script has the anchor in its module after fit: trainer.save_checkpoint)"
        )
    return found[-1]


def read_anchor(run_dir: Path) -> tuple[Json, AnchorStore]:
    """Manifest and anchors of a stopped run, as a restart of its syncer would find them.

    Raises:
        ConfigError: this is no run directory, or the run has no values yet.
        StorageError: a syncer works in it.
        CorruptLogError: the files are damaged.
    """
    if not (run_dir / "syncer" / "log").is_dir():
        raise ConfigError(f"{run_dir} has no syncer/log: no syncer ever ran there; give the RUN_DIR of a run")
    try:
        durable = Durable(run_dir)
    except StorageError as error:
        raise StorageError(
            error.errno, f"{run_dir} cannot be exported: {error}; wait for the run's end, or stop its syncer (SIGTERM)"
        ) from error
    try:
        state = SyncerState(run=run_dir.name)
        store = durable.restore(state, time.monotonic())
    finally:
        durable.close()
    if store is None or state.manifest is None:
        raise ConfigError(f"the run in {run_dir} has no start values yet: nothing was trained; let a learner join")
    return state.manifest, store


def load_anchor(module: L.LightningModule, manifest: Json, store: AnchorStore) -> None:
    """Put the published values into a module's parameters.

    Raises:
        PlanMismatchError: the module is not the run's model, or its frozen values differ.
    """
    params = trainable_parameters(module, manifest["shapes"])
    mine = describe(module, None, params=params)
    check_model(mine, manifest)
    frozen = manifest["frozen"]
    mine = replace(mine, copies=copies_of_trained(module, params))
    confirmed = mine.confirmed(frozen)
    odd = sorted(name for name in frozen if confirmed.get(name) != frozen[name])
    if odd:
        raise PlanMismatchError(
            f"{len(odd)} frozen values are not those of the run, such as {odd[0]}: they must be equal; export "
            "with the configuration, and the pretrained weights, that the run was started with"
        )
    plan, config = plan_of(manifest)
    values = named_values(plan, config.block_size, params, lambda p: store.anchor(p).published)
    with torch.no_grad():
        for name, value in values.items():
            params[name].copy_(value)


def _build(config: Path) -> tuple[L.LightningModule, PreTrainedTokenizerBase | None]:
    """The module on the host, and the tokenizer of its data if there is one."""
    parsed = parse(config)
    data = instantiate(parsed.get("data"))
    if isinstance(data, L.LightningDataModule) and hasattr(data, "tokenizer"):
        data.prepare_data()
        data.setup("fit")
    with default_dtype(parsed["trainer"].get("precision")):
        module = instantiate(parsed["model"])
        with _trainer() as trainer:
            trainer.datamodule = data
            trainer.strategy.connect(module)
            module.trainer = trainer
            module.configure_model()
    module.trainer = None
    return module.eval(), getattr(data, "tokenizer", None)


def _save_transformers(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    bars.disable_progress_bar()
    try:
        if hasattr(model, "merge_and_unload"):
            model.save_pretrained(folder / ADAPTER)
            model = model.merge_and_unload()
        model.config.use_cache = True  # it was off for training; who opens the folder wants to generate
        model.save_pretrained(folder)
    finally:
        bars.enable_progress_bar()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _save_checkpoint(module: L.LightningModule, path: Path) -> None:
    with _trainer() as trainer:
        trainer.strategy.connect(module)
        trainer.save_checkpoint(path, weights_only=True)


@contextmanager
def _trainer() -> Iterator[L.Trainer]:
    """A Trainer that trains nothing: what a module asks for its data, and what writes its checkpoint."""
    chatter = logging.getLogger("lightning.pytorch")
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about accelerators that are there and not used
            yield L.Trainer(
                accelerator="cpu",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
    finally:
        chatter.setLevel(level)
