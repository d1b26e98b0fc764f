"""Identities of local folders and files by content; equal copies at any location have equal identities."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

WEIGHTS = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}
_READ_BYTES = 1 << 20


class Digest(Protocol):
    """A hash that is being computed."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""


def add_file(digest: Digest, file: Path) -> None:
    """Add a file's size and content to a hash."""
    digest.update(file.stat().st_size.to_bytes(8, "big"))
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)


def dataset_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder and its subfolders by relative name; hidden ones are left out."""
    found = {file.relative_to(folder): file for file in folder.rglob("*") if file.is_file()}
    seen = {name.as_posix(): file for name, file in found.items() if not any(p.startswith(".") for p in name.parts)}
    return dict(sorted(seen.items()))


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the files directly in a folder by name; hidden files and weights of a model are left out."""
    found = (file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    return {file.name: file for file in sorted(found) if file.suffix.lower() not in WEIGHTS}


def hash_of(files: dict[str, Path], *options: str | None) -> str:
    """Return a hash of the names and contents of files, and of options."""
    digest = hashlib.blake2b(repr((options, list(files))).encode(), digest_size=16)
    for file in files.values():
        add_file(digest, file)
    return digest.hexdigest()
