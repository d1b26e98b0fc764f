"""The anchor of a run as files that others open: a transformers folder, and a Lightning checkpoint.

1. The anchor comes from the run's disk, see `strategy/anchor.py`; buffers are as the model builds them.
2. What model it is the anchor of: a configuration of LightningCLI. Each learner of a recipe leaves one in its folder
   (config.yaml); any other can be named, for example the recipe itself. A script leaves none: then the parameters are
   written alone, float32 and by the names of its LightningModule.
3. Values take the dtype that the parameters had. Tied weights are stored as transformers stores them.
4. An adapter (PEFT) is merged into its base, so that the folder opens by itself; alone it lies in `adapter/`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as bars

from lightning_diloco.errors import ConfigError
from lightning_diloco.hf.blueprint import default_dtype, instantiate
from lightning_diloco.hf.recipe import parse
from lightning_diloco.strategy.anchor import anchor_values, put_anchor, read_anchor

CHECKPOINT = "lightning.ckpt"
PARAMETERS = "anchor.safetensors"
ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Args:
        folder: where.
        config: the configuration that described the model; None: there was none, and only PARAMETERS was written.
        is_transformers: False if the module has no transformers model, and only the checkpoint was written.
        has_tokenizer: whether the tokenizer lies beside it.
        versions: of the anchor, per fragment.
    """

    folder: Path
    config: Path | None
    is_transformers: bool
    has_tokenizer: bool
    versions: tuple[int, ...]


def export(run_dir: Path, folder: Path, *, config: Path | None = None) -> Exported:
    """Write the anchor of a stopped run.

    Args:
        run_dir: RUN_DIR.
        folder: made if it is not there; must not hold anything else.
        config: of LightningCLI; None: the newest that a learner left in RUN_DIR, if one did.

    Raises:
        ConfigError: the folder is not empty, or this is no run directory.
        PlanMismatchError: the configuration describes another model than the run's.
        StorageError: the run goes on, or its files cannot be read.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: an export needs a folder of its own; choose another, or empty it")
    config = config or find_config(run_dir)
    manifest, store = read_anchor(run_dir)
    versions = tuple(store.anchor(p).version for p in range(len(store.layouts)))
    if config is None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(anchor_values(manifest, store), folder / PARAMETERS, metadata={"format": "pt"})
        return Exported(folder, None, False, False, versions)
    module, tokenizer = _build(config)
    put_anchor(module, manifest, store)
    folder.mkdir(parents=True, exist_ok=True)
    model = getattr(module, "model", None)
    is_transformers = isinstance(model, PreTrainedModel) or hasattr(model, "save_pretrained")
    _save_checkpoint(module, folder / CHECKPOINT)
    if is_transformers:
        _save_transformers(model, tokenizer, folder)
    return Exported(folder, config, is_transformers, is_transformers and tokenizer is not None, versions)


def find_config(run_dir: Path) -> Path | None:
    """The newest configuration that a learner left in a run directory; None: learners were scripts."""
    found = (run_dir / "learners").rglob("config.yaml")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


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
