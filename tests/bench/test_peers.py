"""The comparison with other packages, with this package only, because the others are not installed here."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

from tests.bench import peer_fleet, peers
from tests.bench.peer_learner import NUM_MATRICES, WIDTH


def figures(value: float) -> dict[str, float]:
    return dict.fromkeys(peers.FIGURES, value)


def test_rows_have_a_column_for_each_package_and_checks_compare_medians() -> None:
    found = {
        peers.OURS: [figures(1.0), figures(2.0), figures(9.0)],
        "other": [figures(3.0), figures(math.inf), figures(math.inf)],
    }
    losses = {peers.PLAIN: 2.0, peers.OURS: 2.2, "other": 2.1}
    *rows, loss = peers.rows_of(found, losses)
    assert {row[peers.OURS] for row in rows} == {"2 (1 .. 9)"}
    assert {row["other"] for row in rows} == {"never"}
    assert loss[peers.OURS] == "2.2000 (+10.00%)"
    checks = peers.checks_of(found, losses, landings=0, moved=1)
    behind = [what for what, holds in checks.items() if not holds]
    assert behind == ["ahead of other in 6 of 7 rows", "control: without a package, 0 landings and 1 bytes"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="makes a network namespace")
def test_landings_and_bytes_of_real_learners_are_measured_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_fleet, "NAMESPACE", f"diloco-test-{os.getpid()}")
    python = Path(sys.executable)
    bench = peers.Bench({peers.OURS: python, peers.PLAIN: python}, {})
    given = {"task": "sleep", "step_s": 0.05, "steps": 10**6}
    with peers.namespace():
        assert bench.control() == (0, 0)
        with bench.fleet(peers.OURS, [given, given]) as fleet:
            before = fleet.until_step(24, 120)
            moved = fleet.until_step(120, 120) - before
            landings = sum(landed for _, landed in fleet.clock())
    assert landings >= 12
    assert 0.4 <= moved / 2 / 4 / (4 * NUM_MATRICES * WIDTH**2) <= 0.6
