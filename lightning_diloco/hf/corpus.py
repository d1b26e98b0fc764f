"""Where documents come from: local files, the hub, or the Python standard library's own sources.

1. Files are looked for before any work begins; what is missing is named.
2. A corpus knows its fingerprint without being loaded: for files their content and order, wherever they lie.
3. Every corpus loads as a dataset with one column, `text`, one row per document; as a stream, too.
"""

from __future__ import annotations

import glob
import hashlib
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lightning_diloco.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

TEXT = "text"
BUILDERS = {".parquet": "parquet", ".jsonl": "json"}
STDLIB_PACKAGES = (
    "asyncio", "collections", "concurrent", "email", "http", "importlib", "json", "logging", "multiprocessing",
    "urllib", "xml",
)  # fmt: skip
_READ_BYTES = 1 << 20

AnyDataset = TypeVar("AnyDataset", "Dataset", "IterableDataset")


@dataclass(frozen=True, slots=True)
class FileCorpus:
    """Local files of one kind: parquet and JSON lines hold a document per row, any other file is one document.

    Args:
        files: in the order in which they are read.
        text_column: the column that holds the text, for parquet and JSON lines.
    """

    files: tuple[Path, ...]
    text_column: str = TEXT

    def fingerprint(self) -> str:
        """A hash of what `load` returns, apart from where the files lie."""
        digest = hashlib.blake2b(f"{self._builder}:{self.text_column}".encode(), digest_size=16)
        for file in self.files:
            digest.update(file.stat().st_size.to_bytes(8, "big"))
            with file.open("rb") as stream:
                while block := stream.read(_READ_BYTES):
                    digest.update(block)
        return digest.hexdigest()

    def load(self, scratch_dir: Path) -> Dataset:
        """The documents; the dataset lives in scratch_dir and must not outlive it."""
        return self._read(cache_dir=str(scratch_dir))

    def stream_name(self) -> str:
        """Names what `stream` returns without reading it: the files, by name and size."""
        return repr((self._builder, self.text_column, [(file.name, file.stat().st_size) for file in self.files]))

    def stream(self) -> IterableDataset:
        """The documents as they are read; every file is a shard."""
        return self._read(streaming=True)

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
                f"{which} cannot be read as {self._builder} ({error.__cause__ or error}); what ends in "
                f"{', '.join(BUILDERS)} must be that, any other file UTF-8 text; mend it, or leave it out of files="
            ) from error

    @property
    def _builder(self) -> str:
        return _builder_of(self.files[0])


@dataclass(frozen=True, slots=True)
class HubCorpus:
    """A dataset of the hub, or a local folder that `datasets` can read.

    Args:
        path: as for `datasets.load_dataset`.
        subset: its configuration, where it has several.
        split: the split to read.
        text_column: the column that holds the text.
    """

    path: str
    subset: str | None
    split: str
    text_column: str

    def fingerprint(self) -> str:
        """A hash of what `load` returns; downloads on first use."""
        return self._loaded()._fingerprint

    def load(self, scratch_dir: Path) -> Dataset:
        """The documents, out of the cache of `datasets`; scratch_dir is not used."""
        return self._loaded()

    def stream_name(self) -> str:
        """Names what `stream` returns."""
        return repr((self.path, self.subset, self.split, self.text_column))

    def stream(self) -> IterableDataset:
        """The documents as they are read."""
        return self._loaded(streaming=True)

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


def find_files(patterns: str | Sequence[str], *, text_column: str = TEXT) -> FileCorpus:
    """Local files by name or glob pattern, each pattern's matches sorted.

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
                "name existing files or a glob pattern such as 'texts/**/*.txt'"
            )
    if not problems and not files:
        problems.append("files is empty; name at least one file, or leave it out for the default corpus")
    kinds = {_builder_of(file) for file in files}
    if len(kinds) > 1:
        problems.append(f"files are of several kinds ({', '.join(sorted(kinds))}); choose files of one kind")
    if problems:
        raise ConfigError(problems)
    return FileCorpus(tuple(dict.fromkeys(files)), text_column)


def standard_library() -> FileCorpus:
    """The sources of this Python's standard library: its modules, and some packages without their tests.

    Raises:
        ConfigError: this Python comes without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    # By name: site customizations and build records lie in the same folder and differ from machine to machine.
    modules = [file for file in root.glob("*.py") if file.stem in sys.stdlib_module_names]
    packages = [file for name in STDLIB_PACKAGES for file in (root / name).rglob("*.py") if "test" not in file.parts]
    if not modules:
        raise ConfigError(
            f"no sources of the Python standard library in {root}; the default corpus needs them; "
            "set files= or path= to a text of your own"
        )
    return FileCorpus(tuple(sorted(modules + packages)))


def _builder_of(file: Path) -> str:
    return BUILDERS.get(file.suffix.lower(), TEXT)


def _text_only(dataset: AnyDataset, column: str, *, where: str) -> AnyDataset:
    names = dataset.column_names
    if names is None:  # of a stream that does not say before its first row
        names = list(next(iter(dataset), {}))
    if column not in names:
        raise ConfigError(f"text_column={column!r} is not in {where}; it has {', '.join(names)}; set one of these")
    selected = dataset.select_columns(column)
    return selected if column == TEXT else selected.rename_column(column, TEXT)
