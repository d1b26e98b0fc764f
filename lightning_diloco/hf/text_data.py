"""LightningDataModule of packed text for language models.

1. The constructor only checks and stores options. `prepare_data` looks for the files before it does any work.
2. In a run with several learners, the run's lease table assigns ranges of the training text to learners, so that
   learners may join and leave. During an outage a learner continues with ranges that it has not
   read yet (strategy/data/unleased.py). If a learner has several ranks, the first rank reads for all of them. With
   `leases=False` or another strategy, the loader covers the whole text, and the strategy splits it.
3. With `streaming=True`, only the head of the text is prepared, for the tokenizer and for validation. The rest is
   streamed. Without leases, checkpoints store the stream's position.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightning_diloco.errors import ConfigError
from lightning_diloco.hf import packed_ranges, stream
from lightning_diloco.hf.corpus import TEXT, Corpus, HubCorpus, find_files, standard_library
from lightning_diloco.hf.packed_ranges import PackedRanges
from lightning_diloco.hf.packing import (
    NUM_BYTE_TOKENS,
    TOKENIZER,
    TRAIN,
    VALIDATION,
    HeldOut,
    PackingOptions,
    prepare,
    prepared_dir,
)
from lightning_diloco.hf.stream import StreamedRanges, StreamHead
from lightning_diloco.strategy.data.local_order import START, OwnOrder, Position
from lightning_diloco.strategy.data.range_batches import RangeBatches, RangeLoader, Ranges


class TextData(L.LightningDataModule):
    """Documents, tokenized and packed to sequences of equal length.

    A batch is a dict of `input_ids` and equal `labels`, both int64 of shape (batch_size, seq_len), without padding.
    Tokens are prepared once and stored in `cache_dir`.

    Args:
        path: hub name or local folder of a dataset. Give this, or `files`, or neither to use the sources of the
            Python standard library.
        files: names or glob patterns of local files: parquet or JSON lines with one document per row, or any other
            text with one document per file.
        subset: the configuration of `path`, if it has several.
        split: the split of `path` to read; validation documents are held out of it.
        text_column: the text column.
        tokenizer: hub name or local path of a tokenizer; None: train a byte-level BPE on the training documents.
        vocab_size: vocabulary size of the trained tokenizer, >= 257.
        seq_len: tokens per sequence, >= 2.
        batch_size: sequences per batch, >= 1.
        val_fraction: fraction of the documents that is held out, above 0 and below 1; at least one document.
        max_bytes: read documents in order up to this many bytes of text; None: all. With `streaming`, the limit of
            the head; None: 16 MiB.
        seed: seed of the split, and of shuffling unless a distributed sampler is inserted.
        num_workers: loader processes, >= 0; a thread reads leased and streamed text instead.
        streaming: stream the training text without storing it, for texts that are too large to prepare. Each range
            (`range_size` documents of one parquet or JSON lines file, or of text files of about 1 MiB together) is cut
            into sequences by itself; its rest of less than `seq_len` tokens is dropped.
        leases: lease ranges of the training text from the run; False: each process reads its own fixed part.
        range_size: sequences per lease, >= 1, or documents with `streaming`; None: 128, or 1024 with `streaming`.
        cache_dir: None: `lightning_diloco` in $XDG_CACHE_HOME, else in ~/.cache.

    Raises:
        ConfigError: invalid options; the error names all of them.
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
        streaming: bool = False,
        leases: bool = True,
        range_size: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if problems := self._problems():
            raise ConfigError(problems)
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._sequences: Any = None  # a DatasetDict; the annotation would make the command line import `datasets`
        self._position: Position = START
        self._own_order: OwnOrder | None = None
        self._own_loader: RangeLoader | None = None

    def prepare_data(self) -> None:
        """Tokenize and pack the documents if necessary; several processes may call this at once.

        Raises:
            ConfigError: files are missing or hold too little text.
        """
        prepare(self._directory, self._prepared_corpus, self._options)

    def setup(self, stage: str | None = None) -> None:
        """Open the tokens and the tokenizer."""
        from datasets import load_from_disk

        if self._sequences is not None:
            return
        self.tokenizer = AutoTokenizer.from_pretrained(self._directory / TOKENIZER)
        self._sequences = load_from_disk(str(self._directory)).with_format("torch")

    def train_dataloader(self) -> Iterable[dict[str, Tensor]]:
        """Return a loader of shuffled training sequences, with full batches only."""
        hparams = self.hparams
        generator = torch.Generator().manual_seed(hparams.seed)
        loader = None if hparams.streaming else self._loader(TRAIN, shuffle=True, drop_last=True, generator=generator)
        lease = getattr(self._strategy, "lease", None)
        if hparams.leases and lease is not None:
            num_batches = None if loader is None else len(loader)
            leased = lease(self._ranges, batch_size=hparams.batch_size, collate=_batch, num_batches=num_batches)
            if leased is not None:
                self._own_order = self._own_loader = None
                return leased
        if loader is None:
            part, parts = self._reader
            num_sources = self._ranges.catalogue.num_sources
            self._own_order = OwnOrder(num_sources, part=part, parts=parts, position=self._position)
            own = RangeBatches(self._ranges, self._own_order, batch_size=hparams.batch_size)
            self._own_loader = loader = RangeLoader(own, collate=_batch)
        return loader

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return a loader of all held-out sequences, in order; the last batch may be smaller."""
        return self._loader(VALIDATION, shuffle=False)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Advance the position of an unleased stream when a batch is trained."""
        if self._own_loader is not None and self.trainer is not None and self.trainer.training:
            self._own_loader.trained(0)
        return super().on_before_batch_transfer(batch, dataloader_idx)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of an unleased stream."""
        return {} if self._own_order is None else {"position": dict(self._own_order.position)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position; a lease table, if there is one, overrides it."""
        self._position = state_dict.get("position", START)

    def teardown(self, stage: str | None = None) -> None:
        """Stop the thread that reads a stream."""
        if self._own_loader is not None:
            self._own_loader.close()

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

    @property
    def _prepared_corpus(self) -> Corpus | StreamHead:
        return StreamHead(self._corpus, self._options.max_bytes) if self.hparams.streaming else self._corpus

    @cached_property
    def _ranges(self) -> Ranges:
        """Return the training text as ranges."""
        hparams = self.hparams
        options = {"digest": self._directory.name, "seed": hparams.seed}
        if not hparams.streaming:
            return PackedRanges(
                self._sequences[TRAIN], range_size=hparams.range_size or packed_ranges.RANGE_SIZE, **options
            )
        return StreamedRanges(
            self._corpus,
            tokenizer=self.tokenizer,
            held_out=HeldOut.read(self._directory),
            seq_len=hparams.seq_len,
            range_size=hparams.range_size or stream.RANGE_SIZE,
            **options,
        )

    @property
    def _strategy(self) -> Any:
        return None if self.trainer is None else self.trainer.strategy

    @property
    def _reader(self) -> tuple[int, int]:
        """Return (index, number) of this process among the readers of an unleased stream."""
        if (of_run := getattr(self._strategy, "data_part", None)) is not None:
            return tuple(of_run)  # also counts the learner's ranks
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    @cached_property
    def _options(self) -> PackingOptions:
        names = ("tokenizer", "vocab_size", "seq_len", "val_fraction", "max_bytes", "seed")
        options = {name: self.hparams[name] for name in names}
        if self.hparams.streaming and options["max_bytes"] is None:
            options["max_bytes"] = stream.HEAD_BYTES
        return PackingOptions(**options)

    @cached_property
    def _directory(self) -> Path:
        return prepared_dir(_cache_dir(self.hparams.cache_dir), self._prepared_corpus, self._options)

    def _problems(self) -> list[str]:
        """Return one sentence per invalid option."""
        hparams = self.hparams
        minima = {"seq_len": 2, "batch_size": 1, "num_workers": 0}
        if hparams.tokenizer is None:
            minima["vocab_size"] = NUM_BYTE_TOKENS
        minima |= {name: 1 for name in ("max_bytes", "range_size") if hparams[name] is not None}
        found = [
            f"{name}={hparams[name]!r}: must be at least {minimum}"
            for name, minimum in minima.items()
            if hparams[name] < minimum
        ]
        if not 0 < hparams.val_fraction < 1:
            found.append(f"val_fraction={hparams.val_fraction!r}: must be above 0 and below 1")
        if hparams.path is not None and hparams.files is not None:
            found.append(f"both path={hparams.path!r} and files={hparams.files!r} given: give one of them or neither")
        return found


def _cache_dir(chosen: str | None) -> Path:
    if chosen is not None:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_diloco" / "text"


def _batch(rows: Tensor) -> dict[str, Tensor]:
    return {"input_ids": rows, "labels": rows.clone()}


def _collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = default_collate(rows)
    # A clone, because a batch is moved key by key, and a model may shift its labels in place.
    return {**batch, "labels": batch["input_ids"].clone()}
