"""Packed text for language models as a LightningDataModule.

1. The constructor checks options and stores; files are looked at in `prepare_data`, before any work.
2. Loaders are ordinary ones over everything: splitting them over learners and ranks is the strategy's task.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

import lightning as L
import torch
from datasets import DatasetDict, load_from_disk
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightning_diloco.errors import ConfigError
from lightning_diloco.hf.corpus import TEXT, Corpus, HubCorpus, find_files, standard_library
from lightning_diloco.hf.packing import (
    NUM_BYTE_TOKENS,
    TOKENIZER,
    TRAIN,
    VALIDATION,
    PackingOptions,
    prepare,
    prepared_dir,
)


class TextData(L.LightningDataModule):
    """Documents, tokenized and packed to sequences of equal length.

    A batch is a dict of `input_ids` and `labels`, equal to them, both int64 of shape (batch_size, seq_len); there is
    no padding. Tokens are prepared once and kept under `cache_dir`.

    Args:
        path: hub name, or a local folder, of a dataset; give this or `files`. Neither: the sources of the Python
            standard library.
        files: names or glob patterns of local files: parquet or JSON lines with a document per row, or any other
            text with a document per file.
        subset: the configuration of `path`, where it has several.
        split: the split of `path` to read; validation documents are held out of it.
        text_column: the column that holds the text.
        tokenizer: hub name or local path of a tokenizer; None: train a byte-level BPE on the training documents.
        vocab_size: tokens of the trained tokenizer, >= 257.
        seq_len: tokens per sequence, >= 2.
        batch_size: sequences per batch, >= 1.
        val_fraction: part of the documents that is held out, above 0 and below 1; at least one document.
        max_bytes: read documents in order up to this many bytes of text; None: all.
        seed: of the split, and of the shuffling where no distributed sampler is put in.
        num_workers: loader processes, >= 0.
        cache_dir: None: `lightning_diloco` in $XDG_CACHE_HOME, else in ~/.cache.

    Raises:
        ConfigError: naming every bad option.
    """

    def __init__(
        self,
        path: str | None = None,
        files: str | list[str] | None = None,
        *,
        subset: str | None = None,
        split: str = "train",
        text_column: str = TEXT,
        tokenizer: str | None = None,
        vocab_size: int = 1024,
        seq_len: int = 128,
        batch_size: int = 16,
        val_fraction: float = 0.05,
        max_bytes: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if problems := self._problems():
            raise ConfigError(problems)
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._sequences: DatasetDict | None = None

    def prepare_data(self) -> None:
        """Tokenize and pack, unless that has been done; safe while other processes do the same.

        Raises:
            ConfigError: files are missing, or hold too little text.
        """
        prepare(self._directory, self._corpus, self._options)

    def setup(self, stage: str | None = None) -> None:
        """Open the tokens and the tokenizer."""
        if self._sequences is not None:
            return
        self.tokenizer = AutoTokenizer.from_pretrained(self._directory / TOKENIZER)
        self._sequences = load_from_disk(str(self._directory)).with_format("torch")

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """All training sequences, shuffled; full batches only."""
        generator = torch.Generator().manual_seed(self.hparams.seed)
        return self._loader(TRAIN, shuffle=True, drop_last=True, generator=generator)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """All held-out sequences, in order; the last batch may be smaller."""
        return self._loader(VALIDATION, shuffle=False)

    def _loader(self, split: str, **options: object) -> DataLoader[dict[str, Tensor]]:
        hparams, sequences = self.hparams, self._sequences[split]
        num_needed = hparams.batch_size if split == TRAIN else 1
        if len(sequences) < num_needed:
            raise ConfigError(
                f"the {split} split has {len(sequences)} sequences of seq_len={hparams.seq_len}; it needs at least "
                f"{num_needed}; give more text, or lower batch_size or seq_len"
            )
        return DataLoader(
            sequences,
            batch_size=hparams.batch_size,
            num_workers=hparams.num_workers,
            persistent_workers=hparams.num_workers > 0,
            collate_fn=_collate,
            **options,
        )

    @cached_property
    def _corpus(self) -> Corpus:
        hparams = self.hparams
        if hparams.path is not None:
            return HubCorpus(hparams.path, hparams.subset, hparams.split, hparams.text_column)
        if hparams.files is not None:
            return find_files(hparams.files, text_column=hparams.text_column)
        return standard_library()

    @cached_property
    def _options(self) -> PackingOptions:
        names = ("tokenizer", "vocab_size", "seq_len", "val_fraction", "max_bytes", "seed")
        return PackingOptions(**{name: self.hparams[name] for name in names})

    @cached_property
    def _directory(self) -> Path:
        return prepared_dir(_cache_dir(self.hparams.cache_dir), self._corpus, self._options)

    def _problems(self) -> list[str]:
        """One sentence for each bad option."""
        hparams = self.hparams
        minima = {"seq_len": 2, "batch_size": 1, "num_workers": 0}
        if hparams.tokenizer is None:
            minima["vocab_size"] = NUM_BYTE_TOKENS
        if hparams.max_bytes is not None:
            minima["max_bytes"] = 1
        found = [
            f"{name}={hparams[name]!r}: must be at least {minimum}"
            for name, minimum in minima.items()
            if hparams[name] < minimum
        ]
        if not 0 < hparams.val_fraction < 1:
            found.append(f"val_fraction={hparams.val_fraction!r}: must be above 0 and below 1")
        if hparams.path is not None and hparams.files is not None:
            found.append(f"both path={hparams.path!r} and files={hparams.files!r} given: give one of them, or neither")
        return found


def _cache_dir(chosen: str | None) -> Path:
    if chosen is not None:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_diloco" / "text"


def _collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = default_collate(rows)
    # Not the same tensor twice: a batch is moved key by key, and a model may shift its labels in place.
    return {**batch, "labels": batch["input_ids"].clone()}
