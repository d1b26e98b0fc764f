"""Reads what W&B wrote offline: records in LevelDB's log format, each a protocol buffer.

The format: a header of 7 bytes, then blocks of 32 KiB. A record is cut into pieces that do not cross blocks, each with
a checksum (4 bytes), a length (2), and its place: 1 whole, 2 first, 3 middle, 4 last. Source: LevelDB, log_format.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2 as proto

_HEADER, _BLOCK, _PIECE = 7, 1 << 15, 7
_WHOLE, _LAST = 1, 4


@dataclass
class OfflineRun:
    """One W&B run as stored on disk."""

    id: str = ""
    name: str = ""
    group: str = ""
    project: str = ""
    job_type: str = ""
    axes: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def keys(self) -> set[str]:
        return {key for row in self.rows for key in row if not key.startswith("_")}


def read(folder: Path) -> list[OfflineRun]:
    """Return all runs below a folder, in the order in which they began; no run of this process may still be open."""
    wandb.teardown()  # the W&B service keeps the end of the files in memory until it ends
    paths = [path for path in folder.rglob("offline-run-*/*.wandb") if "latest-run" not in path.parts]
    return [_run(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime)]


def _run(path: Path) -> OfflineRun:
    found = OfflineRun()
    for record in map(proto.Record.FromString, _records(path.read_bytes())):
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run  # a later record has only changed values
                found.id, found.name = run.run_id or found.id, run.display_name or found.name
                found.group, found.project = run.run_group or found.group, run.project or found.project
                found.job_type = run.job_type or found.job_type
            case "metric":
                found.axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            case "history":
                found.rows.append(_items(record.history.item))
            case "summary":
                found.summary.update(_items(record.summary.update))
            case "exit":
                found.exit_code = record.exit.exit_code
    return found


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[bytes]:
    position, parts = _HEADER, b""
    while position + _PIECE <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _PIECE:
            position += left
            continue
        length, place = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + _PIECE : position + _PIECE + length]
        position += _PIECE + length
        if place in (_WHOLE, _LAST):
            yield parts
            parts = b""
