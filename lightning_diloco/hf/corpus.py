"""Sources of documents: local files, the hub, or the sources of the Python standard library.

1. All files are located before any work begins. The error names all missing files.
2. A corpus has a fingerprint without being loaded. For files and local folders it depends on content and order, not on
   their location. A hub dataset has the fingerprint of `datasets`, which needs a download.
3. Every corpus loads as a dataset with one column, `text`, and one row per document. It can also be streamed.
"""

from __future__ import annotations

import glob
import hashlib
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lightning_diloco.errors import ConfigError
from lightning_diloco.hf.folders import add_file, dataset_files, hash_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

TEXT = "text"
BUILDERS = {".parquet": "parquet", ".jsonl": "json"}
STDLIB_PACKAGES = (
    "asyncio", "collections", "concurrent", "email", "http", "importlib", "json", "logging", "multiprocessing",
    "urllib", "xml",
)  # fmt: skip
_SOURCE_BYTES = 1 << 20

AnyDataset = TypeVar("AnyDataset", "Dataset", "IterableDataset")


@dataclass(frozen=True, slots=True)
class FileCorpus:
    """Local files of one kind: parquet or JSON lines with one document per row, or text with one document per file.

    Args:
        files: files in reading order.
        text_column: the text column of parquet and JSON lines files.
    """

    files: tuple[Path, ...]
    text_column: str = TEXT

    def fingerprint(self) -> str:
        """Return a hash of the documents that `load` returns, independent of the files' location."""
        digest = hashlib.blake2b(f"{self._builder}:{self.text_column}".encode(), digest_size=16)
        for file in self.files:
            add_file(digest, file)
        return digest.hexdigest()

    @property
    def name(self) -> str:
        """The name of the corpus in errors."""
        return str(self.files[0]) if len(self.files) == 1 else f"{len(self.files)} files, {self.files[0]} the first"

    def load(self, scratch_dir: Path) -> Dataset:
        """Load the documents; the dataset is stored in scratch_dir and must not outlive it."""
        return self._read(cache_dir=str(scratch_dir))

    def stream_name(self) -> str:
        """Return an identity of the stream from the files' names and sizes, without reading them."""
        return repr((self._builder, self.text_column, [(file.name, file.stat().st_size) for file in self.files]))

    def stream(self) -> IterableDataset:
        """Return the documents as a stream; every file is a shard."""
        return self._read(streaming=True)

    def num_sources(self, num_shards: int) -> int:
        """Return the number of parts that a stream is read in: small text files are joined to about _SOURCE_BYTES."""
        if self._builder != TEXT:
            return num_shards
        return max(1, min(num_shards, sum(file.stat().st_size for file in self.files) // _SOURCE_BYTES))

    def _read(self, **options: object) -> Dataset | IterableDataset:
        from datasets import load_dataset
        from datasets.exceptions import DatasetGenerationError

        if self._builder == TEXT:
            options["sample_by"] = "document"
        names = [str(file) for file in self.files]
        try:
            loaded = load_dataset(self._builder, data_files=names, split="train", **options)
            return _text_only(loaded, self.text_column, where=names[0])
        except ConfigError:
            raise
        except (DatasetGenerationError, OSError, ValueError) as error:
            which = names[0] if len(names) == 1 else f"one of {len(names)} files, {names[0]} the first,"
            raise ConfigError(
                f"{which} cannot be read as {self._builder} ({error.__cause__ or error}); {', '.join(BUILDERS)} files "
                "must have that format, any other file must be UTF-8 text; repair it, or leave it out of files="
            ) from error

    @property
    def _builder(self) -> str:
        return _builder_of(self.files[0])


@dataclass(frozen=True, slots=True)
class HubCorpus:
    """A dataset on the hub, or a local folder that `datasets` can read.

    Args:
        path: path as in `datasets.load_dataset`.
        subset: configuration of the dataset, if it has several.
        split: the split to read.
        text_column: the text column.
    """

    path: str
    subset: str | None
    split: str
    text_column: str

    def fingerprint(self) -> str:
        """Return a hash of the documents that `load` returns, for a folder from its files; downloads on first use."""
        if Path(self.path).is_dir():
            return hash_of(dataset_files(Path(self.path)), self.subset, self.split, self.text_column)
        return self._loaded()._fingerprint

    @property
    def name(self) -> str:
        """The name of the corpus in errors."""
        return self.path

    def load(self, scratch_dir: Path) -> Dataset:
        """Load the documents from the cache of `datasets`; scratch_dir is not used."""
        return self._loaded()

    def stream_name(self) -> str:
        """Return an identity of the stream, for a folder from its files' names and sizes, without reading them."""
        place: object = self.path
        if Path(self.path).is_dir():
            place = [(name, file.stat().st_size) for name, file in dataset_files(Path(self.path)).items()]
        return repr((place, self.subset, self.split, self.text_column))

    def stream(self) -> IterableDataset:
        """Return the documents as a stream."""
        return self._loaded(streaming=True)

    def num_sources(self, num_shards: int) -> int:
        """Return the number of parts that a stream is read in: its shards."""
        return num_shards

    def _loaded(self, **options: object) -> Dataset | IterableDataset:
        from datasets import load_dataset
        from datasets.exceptions import DatasetNotFoundError

        try:
            loaded = load_dataset(self.path, self.subset, split=self.split, **options)
        except (DatasetNotFoundError, ConnectionError) as error:
            raise ConfigError(
                f"dataset path={self.path!r} was not found or not reached ({error}); path must be a hub name or a "
                "local folder; check the name and the network, or set files= to local files"
            ) from error
        return _text_only(loaded, self.text_column, where=self.path)


Corpus = FileCorpus | HubCorpus


def text_of(row: Mapping[str, object], corpus: Corpus, where: str) -> str:
    """Return the text of a row.

    Args:
        row: a row that the corpus has loaded or streamed.
        corpus: its corpus.
        where: the number of the row, for the error.

    Raises:
        ConfigError: the value is missing, or not a string.
    """
    text = row[TEXT]
    if not isinstance(text, str):
        raise ConfigError(
            f"{where} (counted from 0) of {corpus.name} has {text!r} in the column {corpus.text_column!r}; every row "
            "must have a string there; remove the row, or set another text_column"
        )
    return text


def find_files(patterns: str | Sequence[str], *, text_column: str = TEXT) -> FileCorpus:
    """Find local files by name or glob pattern; the matches of each pattern are sorted.

    Raises:
        ConfigError: a pattern matches nothing, or the files are of several kinds.
    """
    problems, files = [], []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = sorted(Path(name).absolute() for name in glob.glob(pattern, recursive=True) if Path(name).is_file())
        files += found
        if not found:
            problems.append(
                f"files={pattern!r}: no such file, looked in {Path.cwd()}; "
                "give existing files or a glob pattern such as 'texts/**/*.txt'"
            )
    if not problems and not files:
        problems.append("files is empty; give at least one file, or leave it out for the default corpus")
    kinds = {_builder_of(file) for file in files}
    if len(kinds) > 1:
        problems.append(f"files are of several kinds ({', '.join(sorted(kinds))}); choose files of one kind")
    if problems:
        raise ConfigError(problems)
    return FileCorpus(tuple(dict.fromkeys(files)), text_column)


def standard_library() -> FileCorpus:
    """Return the sources of the Python standard library: its modules, and some packages without their tests.

    Raises:
        ConfigError: this Python installation has no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    # By name, because the folder also has site customizations and build records, which differ between machines.
    modules = [file for file in root.glob("*.py") if file.stem in sys.stdlib_module_names]
    packages = [file for name in STDLIB_PACKAGES for file in (root / name).rglob("*.py") if "test" not in file.parts]
    if not modules:
        raise ConfigError(
            f"no sources of the Python standard library in {root}; the default corpus needs them; "
            "set files= or path= to your own text"
        )
    return FileCorpus(tuple(sorted(modules + packages)))


def _builder_of(file: Path) -> str:
    return BUILDERS.get(file.suffix.lower(), TEXT)


def _text_only(dataset: AnyDataset, column: str, *, where: str) -> AnyDataset:
    names = dataset.column_names
    if names is None:  # a stream whose columns are unknown before its first row
        names = list(next(iter(dataset), {}))
    if column not in names:
        raise ConfigError(f"text_column={column!r} is not in {where}; it has {', '.join(names)}; set one of these")
    selected = dataset.select_columns(column)
    return selected if column == TEXT else selected.rename_column(column, TEXT)
