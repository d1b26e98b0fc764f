"""Applies the independent check of a run's files (`tests/recorded_run.py`), also to files that it must refuse."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.recorded_run import Check, records

Json = dict[str, Any]


def assert_recorded_exactly(run_dir: Path) -> None:
    assert Check(run_dir).problems == []


def assert_tampering_is_seen(run_dir: Path, to: Path) -> None:
    """Make one change in each copy of a run's files; the check must find each change."""
    changes: dict[str, Callable[[list[Json], Json], object]] = {
        "merged before": _merge_again,
        "merged, although it was refused": _refuse_what_is_merged,
        "follows version": lambda log, _: log.remove(_first(log, "CommitRecord")),
        "trained": lambda log, _: _first(log, "Departed")["progress"].update(tokens=1),
        "the summary says": lambda _, summary: summary.update(tokens_merged=summary["tokens_merged"] - 1),
    }
    for k, (said, change) in enumerate(changes.items()):
        copy = to / str(k)
        shutil.copytree(run_dir / "syncer" / "log", copy / "syncer" / "log")
        (_, log), summary = records(run_dir), json.loads((run_dir / "summary.json").read_text())
        change(log, summary)
        _write(copy, log)
        (copy / "summary.json").write_text(json.dumps(summary))
        assert [problem for problem in Check(copy).problems if said in problem], said


def _first(log: list[Json], kind: str) -> Json:
    return next(record for record in log if record["kind"] == kind)


def _merge_again(log: list[Json], _: Json) -> None:
    one = _first(log, "CommitRecord")
    later = [record for record in log if record["kind"] == "CommitRecord" and record["fragment"] == one["fragment"]]
    later[1]["merges"].append(one["merges"][0])


def _refuse_what_is_merged(log: list[Json], _: Json) -> None:
    one = _first(log, "CommitRecord")
    merge = one["merges"][0]
    fate = {"session": merge["session"], "fragment": one["fragment"], "seq": merge["ready"]["seq"]}
    log.insert(log.index(one), {"kind": "Decided", **fate, "fate": "refused", "reason": "a test"})


def _write(run_dir: Path, log: list[Json]) -> None:
    """Write a log of these records, renumbered and without payloads."""
    frames = []
    for lsn, record in enumerate(log, 1):
        text = json.dumps({name: value for name, value in record.items() if name != "lsn"}).encode()
        frame = struct.pack("<8sBxxxIQQQI", b"DLCOredo", 2, len(text), 0, lsn, lsn, zlib.crc32(text))
        frames.append(frame + struct.pack("<I", zlib.crc32(frame)) + text)
    folder = run_dir / "syncer" / "log"
    for path in folder.glob("*.log"):
        path.unlink()
    (folder / f"{1:020}.log").write_bytes(b"".join(frames))
