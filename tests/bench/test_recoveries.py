"""Tests that the checks of the recoveries bench can fail, and that a real syncer passes them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench import recoveries
from tests.bench.recoveries import CHECKS, Line

BITS = {"master": "aa", "published": "bb", "momentum": "cc"}
MERGE = {"session": "s", "ready": {"start": 0, "stop": 24}, "kept": 1.0}


def anchor(**changed: Any) -> Line:
    return {"generation": 0, "version": 1, "bits": BITS, **changed}


def restart(**changed: Any) -> dict[str, Any]:
    """Return the journals of a process that commits one version and dies, and of the restart after it."""
    account = {"learner": "l0", "incarnation": 1, "merged": [[[0, 24]]], "booked": {"lapsed": 7}, "is_closed": True}
    records = [
        {"kind": "Granted", "session": "s", "learner": "l0", "incarnation": 1},
        {"kind": "CommitRecord", "fragment": 0, "version": 1, "merges": [MERGE]},
    ]
    before = [
        *({"what": "writing", "record": record} for record in records),
        {"what": "durable", "lsn": 2},
        {"what": "installed", "fragment": 0, **anchor()},
        {"what": "told", "fragment": 0, "generation": 0, "version": 1},
        {"what": "booked", "account": ["l0", 1], "booked": {"lapsed": 7}},
        {"what": "killed", "point": "sync:after", "t": 0.5},
    ]
    restored = {"what": "restored", "lsn": 2, "t": 1.0, "fragments": [anchor()], "accounts": [account]}
    for name, value in changed.items():
        (account if name in account else restored)[name] = value
    (row,) = recoveries.recoveries([before, [{"what": "started"}, restored]])
    return {name: row[name] for name in CHECKS}


def test_an_exact_recovery_passes() -> None:
    assert restart() == dict.fromkeys(CHECKS, True)


@pytest.mark.parametrize(
    ("changed", "fails"),
    [
        ({"fragments": [anchor(bits={**BITS, "momentum": "cd"})]}, {"bits"}),
        ({"fragments": [anchor(version=0)]}, {"told", "merged"}),
        ({"fragments": [anchor(generation=1)]}, {"bits", "told"}),
        ({"lsn": 1}, {"told"}),
        ({"merged": [[[0, 23]]]}, {"merged"}),
        ({"booked": {"lapsed": 8}}, {"discarded"}),
    ],
)
def test_an_inexact_recovery_fails(changed: dict[str, Any], fails: set[str]) -> None:
    assert {name for name, holds in restart(**changed).items() if not holds} == fails


def test_a_syncer_that_does_not_come_back_fails() -> None:
    (row,) = recoveries.recoveries([[{"what": "killed", "point": "sync:after"}], []])
    assert not any(row[name] for name in CHECKS)


@pytest.mark.chaos
def test_a_real_syncer_that_is_killed_within_its_writes_comes_back() -> None:
    found = recoveries.run(2, seed=4)
    assert [[row[name] for name in CHECKS] for row in found["recoveries"]] == [[True] * len(CHECKS)] * 2
    assert (found["exit_code"], found["ledger_exact"], found["replayed"]) == (0, True, "merges")
