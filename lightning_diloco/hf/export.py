"""Export of a run's anchor as a transformers folder and a Lightning checkpoint.

1. `export` reads the anchor from the run directory, see `strategy/anchor.py`. Buffers keep the values with which the
   model is built.
2. A LightningCLI config describes the model. Each learner of a recipe saves a config.yaml in its folder. The caller can
   give another config instead, for example the recipe itself. A learner that runs a script saves no config. Without a
   config, `export` only writes the parameters, as float32 under the names of the LightningModule.
3. Values get the dtype of the parameters. Tied weights are stored in the format of transformers.
4. A PEFT adapter is merged into its base, so that the folder can be loaded directly. `adapter/` has the adapter alone.
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
from lightning_diloco.hf.causal_lm import ROUTER_LOGITS
from lightning_diloco.hf.recipe import parse
from lightning_diloco.strategy.anchor import anchor_values, put_anchor, read_anchor

CHECKPOINT = "lightning.ckpt"
PARAMETERS = "anchor.safetensors"
ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Args:
        folder: the folder that was written.
        config: the config that described the model; None if there was no config and only PARAMETERS was written.
        is_transformers: False if the module has no transformers model and only the checkpoint was written.
        has_tokenizer: whether the tokenizer was also written.
        versions: anchor version of each fragment.
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
        folder: target folder, created if necessary; must be empty.
        config: LightningCLI config; None: the newest config that a learner saved in RUN_DIR, if there is one.

    Raises:
        ConfigError: the folder is not empty, or run_dir is not a run directory.
        PlanMismatchError: the config describes another model than the model of the run.
        StorageError: the run is not stopped, or its files cannot be read.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: an export needs an empty folder; choose another, or empty it")
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
    """Return the newest config that a learner saved in a run directory; None if the learners were scripts."""
    found = (run_dir / "learners").rglob("config.yaml")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _build(config: Path) -> tuple[L.LightningModule, PreTrainedTokenizerBase | None]:
    """Build the module on the host; return it with the tokenizer of its data, if there is one."""
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
        _prepare_for_generation(model)
        model.save_pretrained(folder)
    finally:
        bars.enable_progress_bar()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _prepare_for_generation(model: Any) -> None:
    """Turn the cache on, which is off for training, in both configs, and the balancing term of experts off."""
    model.config.use_cache = True
    if getattr(model, "generation_config", None) is not None:  # transformers copied the value when it built the model
        model.generation_config.use_cache = True
    decoder = model.config.get_text_config()
    if hasattr(decoder, ROUTER_LOGITS):
        setattr(decoder, ROUTER_LOGITS, False)


def _save_checkpoint(module: L.LightningModule, path: Path) -> None:
    with _trainer() as trainer:
        trainer.strategy.connect(module)
        trainer.save_checkpoint(path, weights_only=True)


@contextmanager
def _trainer() -> Iterator[L.Trainer]:
    """Yield a Trainer that does not train, but gives the module its data and writes its checkpoint."""
    chatter = logging.getLogger("lightning.pytorch")
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about available accelerators that are not used
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
