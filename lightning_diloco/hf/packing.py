"""One-time conversion of documents to token sequences on disk.

1. Documents are split first, so the tokenizer is trained on the training documents only.
2. Equal documents are in the same split, regardless of their position in the corpus.
3. Documents are joined by the end-of-sequence token and cut into full sequences. Each split drops only its last,
   incomplete sequence.
4. A folder that exists is complete, because one process at a time writes it under another name and then renames it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_diloco.errors import ConfigError
from lightning_diloco.hf.corpus import TEXT, Corpus, text_of
from lightning_diloco.hf.folders import hash_of, tokenizer_files
from lightning_diloco.hf.hub import fetched

if TYPE_CHECKING:
    from datasets import Dataset

TRAIN, VALIDATION, TOKENIZER, HELD_OUT = "train", "validation", "tokenizer", "held_out.json"
END_OF_TEXT = "<|endoftext|>"
NUM_BYTE_TOKENS = 256 + 1  # every byte, and the end of text
_FORMAT = 1
_PARTIAL = ".partial"
_DOCUMENTS_PER_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingOptions:
    """The options that, together with the corpus, determine the tokens on disk.

    Args:
        tokenizer: hub name or local path; None: train one.
        vocab_size: vocabulary size of a trained tokenizer.
        seq_len: tokens per sequence.
        val_fraction: fraction of the documents that is held out.
        max_bytes: stop before the document that would exceed this many UTF-8 bytes of text; None: use all.
        seed: seed of the split.
    """

    tokenizer: str | None
    vocab_size: int
    seq_len: int
    val_fraction: float
    max_bytes: int | None
    seed: int


def prepared_dir(cache_dir: Path, corpus: Corpus, options: PackingOptions) -> Path:
    """Return the folder for these tokens; its name is a hash of the corpus and all options.

    A tokenizer in a local folder counts by the content of its files, wherever the folder is.
    """
    values = asdict(options)
    if options.tokenizer is not None and Path(options.tokenizer).is_dir():
        values["tokenizer"] = hash_of(tokenizer_files(Path(options.tokenizer)))
    identity = json.dumps([_FORMAT, corpus.fingerprint(), values], sort_keys=True)
    return cache_dir / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def prepare(directory: Path, corpus: Corpus, options: PackingOptions) -> None:
    """Write the tokenizer and both splits to `directory`, unless it exists.

    Several processes may call this at once. One process does the work and the others wait.

    Raises:
        ConfigError: the corpus is too small, a row has no text, or the tokenizer has no end-of-sequence token.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_suffix(".lock")):
        if directory.exists():
            return
        for left_behind in directory.parent.glob(f"{directory.name}.*{_PARTIAL}"):  # by a killed process
            shutil.rmtree(left_behind, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(_PARTIAL, f"{directory.name}.", directory.parent))  # new folder, random name
        partial, scratch = folder / "made", folder / "scratch"
        try:
            _write(partial, corpus, options, scratch)
            partial.rename(directory)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _write(directory: Path, corpus: Corpus, options: PackingOptions, scratch: Path) -> None:
    from datasets import Dataset, DatasetDict, Features, List, Value

    documents = _capped(corpus.load(scratch), corpus, options.max_bytes)
    sides, held_out = _split(documents, corpus, options.val_fraction, options.seed)
    tokenizer = _tokenizer(sides[TRAIN], options)
    tokenizer.save_pretrained(str(directory / TOKENIZER))
    packed = DatasetDict()
    for name, side in sides.items():
        if next(_sequences(side, tokenizer, options.seq_len), None) is None:
            raise ConfigError(
                f"the {name} split has fewer than seq_len={options.seq_len} tokens; "
                "give more text, lower seq_len, or change val_fraction or seed"
            )
        packed[name] = Dataset.from_generator(
            _sequences,
            features=Features({"input_ids": List(Value("int32"))}),
            cache_dir=str(scratch),
            gen_kwargs={"documents": side, "tokenizer": tokenizer, "seq_len": options.seq_len},
            fingerprint=f"{directory.stem}-{name}",
        )
    packed.save_to_disk(str(directory))
    (directory / HELD_OUT).write_text(json.dumps(asdict(held_out)))


def _texts(documents: Dataset, corpus: Corpus) -> Iterator[str]:
    return (text_of(row, corpus, f"row {index}") for index, row in enumerate(documents))


def _capped(documents: Dataset, corpus: Corpus, max_bytes: int | None) -> Dataset:
    if max_bytes is None:
        return documents
    ends = itertools.accumulate(len(text.encode()) for text in _texts(documents, corpus))
    return documents.select(range(sum(1 for _ in itertools.takewhile(lambda end: end <= max_bytes, ends))))


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The set of documents that are held out for validation: `text in held_out`.

    Args:
        seed: seed of the split.
        last: highest hash of a held-out document, in hex.
    """

    seed: int
    last: str

    def __contains__(self, text: str) -> bool:
        return _hash(text, self.seed) <= bytes.fromhex(self.last)

    @classmethod
    def read(cls, directory: Path) -> HeldOut:
        """Read the held-out set of a prepared folder."""
        return cls(**json.loads((directory / HELD_OUT).read_text()))


def _hash(text: str, seed: int) -> bytes:
    return hashlib.blake2b(text.encode(), key=str(seed).encode()).digest()


def _split(documents: Dataset, corpus: Corpus, val_fraction: float, seed: int) -> tuple[dict[str, Dataset], HeldOut]:
    """Hold out the documents with the lowest seeded hashes, at least one."""
    hashes = [_hash(text, seed) for text in _texts(documents, corpus)]
    distinct = sorted(set(hashes))
    if len(distinct) < 2:
        raise ConfigError(
            f"the corpus has {len(distinct)} different documents; it needs at least 2, one of them for validation; "
            "give more files, or raise max_bytes"
        )
    num_held_out = min(max(1, round(val_fraction * len(distinct))), len(distinct) - 1)
    last = distinct[num_held_out - 1]
    sides = {
        TRAIN: documents.select([row for row, value in enumerate(hashes) if value > last]),
        VALIDATION: documents.select([row for row, value in enumerate(hashes) if value <= last]),
    }
    return sides, HeldOut(seed, last.hex())


def _tokenizer(documents: Dataset, options: PackingOptions) -> PreTrainedTokenizerBase:
    if options.tokenizer is None:
        return _train_tokenizer(documents, options.vocab_size)
    with fetched("tokenizer", options.tokenizer):
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"tokenizer={options.tokenizer!r} has no end-of-sequence token, which must separate documents; "
            "choose another tokenizer, or leave it out to train one"
        )
    return tokenizer


def _train_tokenizer(documents: Dataset, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, which can encode any text without unknown tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((row[TEXT] for row in documents), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def _sequences(documents: Dataset, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> Iterator[dict[str, list[int]]]:
    batches = (batch[TEXT] for batch in documents.iter(_DOCUMENTS_PER_BATCH))
    return ({"input_ids": ids} for ids in pack(batches, tokenizer, seq_len))


def pack(batches: Iterable[list[str]], tokenizer: PreTrainedTokenizerBase, seq_len: int) -> Iterator[list[int]]:
    """Join and cut batches of documents into full sequences (rule 3)."""
    pending: list[int] = []
    for batch in batches:
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            pending += [*ids, tokenizer.eos_token_id]
        num_full = len(pending) // seq_len * seq_len
        for start in range(0, num_full, seq_len):
            yield pending[start : start + seq_len]
        pending = pending[num_full:]
