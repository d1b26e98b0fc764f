"""Ranges of streamed text, which is never stored.

1. A range is a block of consecutive documents of one source: a shard, or several small text files. They are tokenized,
   joined by the end-of-sequence token and cut into full sequences. The incomplete rest is dropped. The content of a
   range depends only on the range.
2. The prepared head of the stream (packing.py) holds out documents for validation. They are skipped at every position
   in the stream. All other documents whose hash is not above the highest held-out hash are skipped, too.
3. Every epoch has its own order of sources, and of sequences within a range.
4. A source is read on from its current position. It is reopened for a block before that position.
5. A reader that has read a whole epoch without a full sequence raises an error, because it would never find one.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_diloco.errors import ConfigError
from lightning_diloco.hf.corpus import TEXT, Corpus, text_of
from lightning_diloco.hf.packing import HeldOut, pack
from lightning_diloco.protocol.data_ranges import Catalogue, Lease

if TYPE_CHECKING:
    from datasets import Dataset

RANGE_SIZE = 1024
HEAD_BYTES = 16 << 20
_MAX_OPEN = 8


@dataclass(frozen=True, slots=True)
class StreamHead:
    """The head of a stream as a corpus, for the tokenizer and for validation.

    Args:
        corpus: the corpus that is streamed.
        max_bytes: maximum bytes of text.
    """

    corpus: Corpus
    max_bytes: int

    def fingerprint(self) -> str:
        """Return an identity of the stream, without reading it."""
        return f"stream:{self.corpus.stream_name()}"

    @property
    def name(self) -> str:
        """The name of the corpus in errors."""
        return self.corpus.name

    @property
    def text_column(self) -> str:
        """The text column of the corpus."""
        return self.corpus.text_column

    def load(self, scratch_dir: object) -> Dataset:
        """Read documents up to max_bytes."""
        from datasets import Dataset

        texts, left = [], self.max_bytes
        for index, row in enumerate(self.corpus.stream()):
            text = text_of(row, self.corpus, f"row {index}")
            left -= len(text.encode())
            if left < 0:
                break
            texts.append(text)
        return Dataset.from_dict({TEXT: texts})


class StreamedRanges:
    """Ranges of a stream.

    Args:
        corpus: the corpus that is streamed.
        tokenizer: tokenizer with an end-of-sequence token.
        held_out: documents that are excluded from training.
        digest: identity of the stream.
        seq_len: tokens per sequence.
        seed: seed of the orders.
        range_size: documents per range.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        tokenizer: PreTrainedTokenizerBase,
        held_out: HeldOut,
        digest: str,
        seq_len: int,
        seed: int,
        range_size: int = RANGE_SIZE,
    ) -> None:
        self._corpus, self._documents = corpus, corpus.stream()
        self._tokenizer, self._held_out = tokenizer, held_out
        self._seq_len, self._seed, self._range_size = seq_len, seed, range_size
        self._open: OrderedDict[int, tuple[int, Iterator[dict[str, str]]]] = OrderedDict()
        self._has_read = False
        self._empty: dict[tuple[int, int], int] = {}  # tokens of each range without a sequence, by source and index
        self._ends: dict[int, int] = {}  # number of ranges in each source
        num_sources = corpus.num_sources(self._documents.num_shards)
        self.catalogue = Catalogue(f"{digest}/{range_size}/{seed}", num_sources, None)

    def read(self, lease: Lease) -> tuple[Tensor, bool]:
        """Return the sequences of a lease, int64 (n, seq_len), and whether its source ends in this range.

        Raises:
            ConfigError: no range of an epoch has a sequence.
        """
        source = int(self._permutation(self.catalogue.num_sources, lease.epoch)[lease.source])
        texts = self._block(source, lease.index * self._range_size)
        is_last = len(texts) < self._range_size
        wanted = [text for text in texts if text not in self._held_out]
        sequences = list(pack([wanted] if wanted else [], self._tokenizer, self._seq_len))
        self._has_read |= len(sequences) > 0
        if not self._has_read:
            self._note_empty(source, lease.index, wanted, is_last=is_last)
        rows = torch.tensor(sequences, dtype=torch.int64).reshape(len(sequences), self._seq_len)
        order = self._permutation(len(rows), lease.epoch, lease.source, lease.index)
        return rows[order][lease.skip :], is_last

    def _block(self, source: int, first: int) -> list[str]:
        at, documents = self._open.pop(source, (0, None))
        if documents is None or at > first:
            at, documents = 0, iter(self._documents.shard(self.catalogue.num_sources, source))
        rows = itertools.islice(documents, first - at, first - at + self._range_size)
        texts = [text_of(row, self._corpus, f"row {first + n} of source {source}") for n, row in enumerate(rows)]
        self._open[source] = (first + self._range_size, documents)
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return texts

    def _note_empty(self, source: int, index: int, wanted: list[str], *, is_last: bool) -> None:
        tokenized = self._tokenizer(wanted, add_special_tokens=False, verbose=False)["input_ids"] if wanted else []
        self._empty[source, index] = sum(len(ids) + 1 for ids in tokenized)
        if is_last:
            self._ends[source] = min(index + 1, self._ends.get(source, index + 1))
        num_sources = self.catalogue.num_sources
        if len(self._ends) < num_sources or any(
            (each, k) not in self._empty for each, end in self._ends.items() for k in range(end)
        ):
            return
        raise ConfigError(
            f"a whole epoch of the stream has no sequence of seq_len={self._seq_len} tokens: the longest of its "
            f"{num_sources} sources has {max(self._empty.values())} tokens per {self._range_size} documents, and a "
            "sequence does not span two; lower seq_len, give fewer and larger files, or set streaming=False"
        )

    def _permutation(self, size: int, *where: int) -> Tensor:
        seed = 0
        for number in (self._seed, *where):
            seed = (seed * 1_000_003 + number + 1) % 2**63
        return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
