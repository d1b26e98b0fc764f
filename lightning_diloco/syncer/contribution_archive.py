"""The files of `--record contributions`, from which a replay computes a run's anchors and ledger again.

    <directory>/seed-<fragment>.safetensors                  the start values, float32
    <directory>/commit-<fragment>-<version>.safetensors      the received bytes, in the order of the merge

1. The process that merges writes and fsyncs a file before the log record of its commit, so each commit in the log has
   a file. A crash may leave a file without a commit. The next commit of that version replaces the file.
2. Each file has a description, and a checksum over the description and all tensors.

Source: our choice.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.errors import CorruptLogError
from lightning_diloco.protocol.codec import Json
from lightning_diloco.storage.files import make_directory, write_whole
from lightning_diloco.syncer.anchors import AnchorStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One recorded commit.

    Args:
        record: the commit's log record.
        sessions: the contributors, in the order of the merge; the last bit of the result depends on this order.
        max_norms: norm limit of each contribution; a longer contribution was scaled down to it.
        payloads: encoded contributions, uint8.
    """

    record: Json
    sessions: tuple[str, ...]
    max_norms: tuple[float, ...]
    payloads: tuple[Tensor, ...]


class Recorder:
    """Writes the files of one run.

    Args:
        directory: RUN_DIR/syncer/contributions.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep_seed(self, store: AnchorStore) -> None:
        """Write the start values. Raises `StorageError`."""
        for p in store.mine:
            about: Json = {"fragment": p}
            _write(self._directory / f"seed-{p:04d}.safetensors", about, {"values": store.anchor(p).published})

    def keep(self, recorded: Recorded) -> None:
        """Write a commit before its record is logged. Raises `StorageError`."""
        about: Json = {
            "record": recorded.record,
            "sessions": list(recorded.sessions),
            "max_norms": [limit if math.isfinite(limit) else None for limit in recorded.max_norms],
        }
        tensors = {f"{number:04d}": payload for number, payload in enumerate(recorded.payloads)}
        name = f"commit-{recorded.record['fragment']:04d}-{recorded.record['version']:08d}.safetensors"
        _write(self._directory / name, about, tensors)


def read_commit(path: Path) -> Recorded:
    """Read a file of `Recorder.keep`.

    Raises:
        CorruptLogError: the file is damaged.
    """
    about, tensors = _read(path)
    limits = cast("Sequence[float | None]", about["max_norms"])
    return Recorded(
        record=cast("Json", about["record"]),
        sessions=tuple(cast("Sequence[str]", about["sessions"])),
        max_norms=tuple(math.inf if limit is None else limit for limit in limits),
        payloads=tuple(tensors[name] for name in sorted(tensors)),
    )


def read_seed(path: Path) -> Tensor:
    """Read a file of `Recorder.keep_seed`: float32 (P,).

    Raises:
        CorruptLogError: the file is damaged.
    """
    return _read(path)[1]["values"]


def _write(path: Path, about: Json, tensors: Mapping[str, Tensor]) -> None:
    make_directory(path.parent)
    said = json.dumps(about, sort_keys=True, allow_nan=False)
    write_whole(path, save(dict(tensors), {"about": said, "sha256": _checksum(said, tensors)}))


def _read(path: Path) -> tuple[Json, dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
        said = metadata["about"]
        is_whole = metadata["sha256"] == _checksum(said, tensors)
    except (SafetensorError, KeyError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not is_whole:
        raise _damaged(path, "its checksum differs")
    return json.loads(said), tensors


def _checksum(said: str, tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256(said.encode())
    for name in sorted(tensors):
        total.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        total.update(bytes_of(tensors[name]))
    return total.hexdigest()


def _damaged(path: Path, found: str) -> CorruptLogError:
    return CorruptLogError(
        f"{path}: {found}; the recorded file is damaged; restore it from a backup, or replay from a later snapshot"
    )
