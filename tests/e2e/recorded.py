"""Applies the independent check of a run's files (`tests/recorded_run.py`), also to files that it must refuse.

Each change below is made in a copy of a sound run. It must be found, and the words beside it are a part of the message.
"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recorded_log import records
from tests.recorded_run import Check, main

Json = dict[str, Any]
Edit = Callable[[list[Json], Json], object]
Change = tuple[str, Edit]

OTHER_VALUES: Json = {
    "tokens_seen": 1, "tokens_merged": 1, "tokens_pending": 1, "fleet_tokens": 0.5, "tokens_repeated": 9999999,
    "ranges_done": 9999, "ledger_exact": False, "versions": [1], "rounds": 1, "participation": 0.001, "joins": 99,
    "lapses": 99, "stopped": "a test", "config": {"sync_every": 1},
}  # fmt: skip


def assert_recorded_exactly(run_dir: Path) -> None:
    assert Check(run_dir).problems == []


def assert_tampering_is_seen(run_dir: Path, to: Path) -> None:
    """Make each change of a run whose learners were killed, replaced and left in good order.

    Args:
        run_dir: the run, with its whole log.
        to: a new folder, for the copies.
    """
    _, log = records(run_dir)
    kinds = {record["kind"] for record in log}
    assert {"Lapsed", "Departed"} <= kinds, kinds
    changes = [*IN_THE_LOG, *_in_the_summary(), *(WITH_LEASES if "RangesSettled" in kinds else ())]
    for k, (said, change) in enumerate(changes):
        copy = to / str(k)
        shutil.copytree(run_dir / "syncer" / "log", copy / "syncer" / "log")
        (_, log), summary = records(run_dir), json.loads((run_dir / "summary.json").read_text())
        change(log, summary)
        _write(copy, log)
        (copy / "summary.json").write_text(json.dumps(summary))
        problems = Check(copy).problems
        assert [problem for problem in problems if said in problem], (said, problems)


def assert_damage_is_told(run_dir: Path, to: Path, said: pytest.CaptureFixture[str]) -> None:
    """Damage copies of a run's files; the check must say what it found, and end with 1."""
    for k, (words, damage) in enumerate(DAMAGE):
        copy = to / str(k)
        shutil.copytree(run_dir / "syncer" / "log", copy / "syncer" / "log")
        shutil.copy(run_dir / "summary.json", copy)
        damage(copy)
        assert main([str(copy)]) == 1
        assert words in (found := said.readouterr().out), (words, found)
    assert main([]) == 1


# ---------------------------------------------------------------------------------------------------------- the changes


def _all(log: list[Json], kind: str) -> Iterator[Json]:
    return (record for record in log if record["kind"] == kind)


def _first(log: list[Json], kind: str) -> Json:
    return next(_all(log, kind))


def _drop(kind: str) -> Edit:
    return lambda log, _: log.remove(_first(log, kind))


def _merge_again(log: list[Json], _: Json) -> None:
    one = _first(log, "CommitRecord")
    later = [record for record in _all(log, "CommitRecord") if record["fragment"] == one["fragment"]]
    later[1]["merges"].append(one["merges"][0])


def _repeat_a_number(log: list[Json], _: Json) -> None:
    before: dict[tuple[str, int], int] = {}
    for record in _all(log, "CommitRecord"):
        for merge in record["merges"]:
            key, ready = (merge["session"], record["fragment"]), merge["ready"]
            if key in before:
                ready["seq"] = before[key]
                return
            before[key] = ready["seq"]


def _refuse(log: list[Json], reasons: tuple[str, ...], *, before: bool) -> None:
    one = _first(log, "CommitRecord")
    merge = one["merges"][0]
    fate = {"session": merge["session"], "fragment": one["fragment"], "seq": merge["ready"]["seq"], "fate": "refused"}
    at = log.index(one) + (not before)
    log[at:at] = [{"kind": "Decided", **fate, "reason": reason} for reason in reasons]


def _other_cause_in_the_log(log: list[Json], summary: Json) -> None:
    """Let a learner report one more token as refused, in books that balance, in the log and in the summary."""
    departed = _first(log, "Departed")
    progress, num_fragments = departed["progress"], len(summary["versions"])
    progress["tokens"] += 1
    progress["discarded"]["refused"] = progress["discarded"].get("refused", 0) + num_fragments
    summary["tokens_discarded"]["refused"] = summary["tokens_discarded"].get("refused", 0) + num_fragments
    summary["tokens_seen"] += num_fragments


def _other_cause_in_the_summary(_: list[Json], summary: Json) -> None:
    lost = summary["tokens_discarded"]
    lost["lapsed"], lost["undrained"] = lost.get("undrained", 0), lost["lapsed"]


def _train_more(log: list[Json], _: Json) -> None:
    _first(log, "Departed")["progress"]["tokens"] += 1


def _claim_pending(log: list[Json], _: Json) -> None:
    _first(log, "Departed")["progress"]["pending"][0] = [[0, 1]]


def _other_replaced(log: list[Json], _: Json) -> None:
    """Drop the report of a session that is replaced; if there is none, add one of none."""
    replaces = [record for record in _all(log, "Activated") if record["replaced"]]
    if replaces:
        replaces[0]["replaced"] = None
    else:
        _first(log, "Activated")["replaced"] = {"seen": 0, "declared": None}


def _after(kind: str, other: str) -> Edit:
    """Insert a record of a kind after the first one of another kind, for the same session."""

    def change(log: list[Json], _: Json) -> None:
        first = _first(log, other)
        log.insert(log.index(first) + 1, {**first, "kind": kind})

    return change


IN_THE_LOG: list[Change] = [
    ("were merged before", _merge_again),
    ("merged, although it was ('merged'", _repeat_a_number),
    ("merged, although it was ('refused'", lambda log, _: _refuse(log, ("a test",), before=True)),
    ("refused, although it was ('merged'", lambda log, _: _refuse(log, ("a test",), before=False)),
    ("refused, although it was ('refused'", lambda log, _: _refuse(log, ("a test", "another"), before=True)),
    ("follows version", _drop("CommitRecord")),
    ("the generation is 0", lambda log, _: _first(log, "CommitRecord").update(generation=1)),
    ("reports 1 tokens in each", lambda log, _: _first(log, "Departed")["progress"].update(tokens=1)),
    ("; the log has {'merged'", _claim_pending),
    ("trained", _train_more),
    ("nothing in the log is the cause", _other_cause_in_the_log),
    ("token x fragment seen", lambda log, _: _first(log, "Lapsed")["heard"].update(seen=10**9)),
    ("was never granted", _drop("Granted")),
    ("although its learner is granted", _drop("Activated")),
    ("the summary says finished, but", _drop("Departed")),
    ("only the log has the learner", _drop("Departed")),
    ("the summary says lapses", _drop("Lapsed")),
    ("takes part, although it is live", _after("Activated", "Activated")),
    ("has lapsed, although it is lapsed", _after("Lapsed", "Lapsed")),
    ("has returned, although it is live", _after("Returned", "Activated")),
    ("has departed, although it is left", _after("Departed", "Departed")),
    ("last report of the", _other_replaced),
    ("is unknown", lambda log, _: _first(log, "Departed").update(kind="Gone")),
    ("KeyError: 'progress'", lambda log, _: _first(log, "Departed").pop("progress")),
]


def _in_the_summary() -> Iterator[Change]:
    yield "token x fragment lapsed", _other_cause_in_the_summary
    yield "token x fragment undrained", _other_cause_in_the_summary
    yield "only the log has the learner", lambda _, summary: summary["learners"].pop()
    for name in ("incarnation", "tokens", "step", "num_refused", "num_clipped", "quarantined"):
        yield "only the summary has the learner", _set(name, 123456, _left)
    for name, value in OTHER_VALUES.items():
        yield f"the summary says {name} ", _set(name, value)
    yield "KeyError: 'joins'", lambda _, summary: summary.pop("joins")


def _set(name: str, value: object, of: Callable[[Json], Json] = lambda summary: summary) -> Edit:
    return lambda _, summary: of(summary).update({name: value})


def _left(summary: Json) -> Json:
    return next(learner for learner in summary["learners"] if learner["phase"] == "left")


# --------------------------------------------------------------------------------------------------------------- leases


def _settled(log: list[Json], name: str) -> Json:
    return next(record for record in _all(log, "RangesSettled") if record[name])


def _keep_what_is_taken(log: list[Json], _: Json) -> None:
    """Drop the return of a range that another learner takes over later."""
    grants = [grant for record in _all(log, "RangesLeased") for grant in record["grants"]]
    taken = next(grant["taken"] for grant in grants if grant["taken"] not in (None, grant["lease"]["number"]))
    log.remove(next(record for record in _all(log, "RangesSettled") if taken in record["back"]))


def _settle_early(log: list[Json], _: Json) -> None:
    """Settle a range when the first commit that names it is there, before those of the other fragments."""
    settled = _settled(log, "done")
    number = settled["done"][0]
    at = next(k for k, record in enumerate(log) if any(span["number"] == number for span in _spans(record)))
    log.remove(settled)
    log.insert(at + 1, {**settled, "done": [number], "back": []})


def _spans(record: Json) -> Iterator[Json]:
    return (span for merge in record.get("merges", ()) for span in merge["ready"]["spans"])


def _lease_again(log: list[Json], _: Json) -> None:
    first, *_between, last = [record for record in _all(log, "RangesLeased") if record["grants"][-1]["taken"] is None]
    place = {name: first["grants"][0]["lease"][name] for name in ("epoch", "source", "index")}
    last["grants"][-1]["lease"].update(place)


WITH_LEASES: list[Change] = [
    ("the summary says ranges_done", lambda log, _: log.remove(_settled(log, "done"))),
    ("reports for the last time, but holds the leases", lambda log, _: log.remove(_settled(log, "back"))),
    ("was not given back", _keep_what_is_taken),
    ("it was done before, or never leased", lambda log, _: log.append(_settled(log, "done"))),
    ("does not hold it", lambda log, _: log.append(_settled(log, "back"))),
    ("are not merged", _settle_early),
    ("was leased before lease", _lease_again),
    ("never leased", _drop("RangesLeased")),
]


# --------------------------------------------------------------------------------------------------------------- damage


def _log_of(run_dir: Path) -> Path:
    return min((run_dir / "syncer" / "log").glob("*.log"))


def _cut(run_dir: Path, size: int) -> None:
    _log_of(run_dir).write_bytes(_log_of(run_dir).read_bytes()[:size])


def _without_a_record(run_dir: Path) -> None:
    _, log = records(run_dir)
    del log[len(log) // 2]
    _write(run_dir, log, renumbers=False)


def _flip(run_dir: Path, position: int) -> None:
    data = bytearray(_log_of(run_dir).read_bytes())
    data[position] ^= 4
    _log_of(run_dir).write_bytes(data)


DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("syncer/log is missing", lambda run_dir: shutil.rmtree(run_dir / "syncer")),
    ("holds no records", lambda run_dir: _cut(run_dir, 0)),
    ("the record at byte 0 is cut off", lambda run_dir: _cut(run_dir, 20)),
    ("is cut off", lambda run_dir: _cut(run_dir, -1)),
    ("the record at byte 0 is damaged", lambda run_dir: _flip(run_dir, 20)),
    ("record 1 is damaged", lambda run_dir: _flip(run_dir, 60)),
    ("no record at byte 0", lambda run_dir: _log_of(run_dir).write_text("a foreign file")),
    ("the log is not whole", _without_a_record),
    ("FileNotFoundError", lambda run_dir: (run_dir / "summary.json").unlink()),
    ("summary.json is not as a run writes it", lambda run_dir: (run_dir / "summary.json").write_text("{")),
    ("summary.json is not as a run writes it", lambda run_dir: (run_dir / "summary.json").write_text("[]")),
    ("summary.json is not as a run writes it", lambda run_dir: (run_dir / "summary.json").write_bytes(b"\xff\xfe")),
]


def _write(run_dir: Path, log: list[Json], *, renumbers: bool = True) -> None:
    """Write a log of these records, without payloads."""
    frames = []
    for number, record in enumerate(log, 1):
        lsn = number if renumbers else record["lsn"]
        text = json.dumps({name: value for name, value in record.items() if name != "lsn"}).encode()
        frame = struct.pack("<8sBxxxIQQQI", b"DLCOredo", 2, len(text), 0, lsn, lsn, zlib.crc32(text))
        frames.append(frame + struct.pack("<I", zlib.crc32(frame)) + text)
    folder = run_dir / "syncer" / "log"
    for path in folder.glob("*.log"):
        path.unlink()
    (folder / f"{1:020}.log").write_bytes(b"".join(frames))
