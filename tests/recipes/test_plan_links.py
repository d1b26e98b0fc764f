"""The forecast of `diloco plan` for links agrees with a real learner behind a capped link within 15 %.

Unlike a network, a proxy lets through exactly its rate, so the rate is the usable part of a link (LINK_SHARE of it).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.config import RunConfig
from lightning_diloco.planner import bandwidth
from lightning_diloco.planner.bandwidth import LINK_SHARE, Machines
from lightning_diloco.planner.memory import Training
from lightning_diloco.planner.plan import Forecast, Scenario, forecast
from lightning_diloco.storage.tape import read_tape
from lightning_diloco.transport.faults import FaultProxy
from tests.bench.processes import MEASURED, STEPPING, Sleeper, Started, start_syncer
from tests.e2e.conftest import Processes, until

TOLERANCE = 0.15
RATE_BPS, DELAY_S = 8e6, 0.02
WIDTH, MATRICES = 256, 32  # 2.1M parameters: 0.5 s for a fragment
SLEEPER = Sleeper(step_s=0.1, num_steps=240, numel=MATRICES * WIDTH**2, width=WIDTH)
OPTIONS = {"sync_every": 40, "num_fragments": 4, "overlap": 4}

pytestmark = pytest.mark.slow


@dataclass
class Ran:
    """Measurements of the run.

    Args:
        step_s: mean time of an inner step.
        up_bps: bits per second at the socket, between two commits that are far apart.
        commits: commits on the tape between these two.
    """

    step_s: float
    up_bps: float
    commits: list[dict[str, Any]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    processes = Processes(tmp_path_factory.mktemp("capped"))
    try:
        yield _run(processes)
    finally:
        processes.kill_all()


def _run(processes: Processes) -> Ran:
    syncer = start_syncer(processes, 1, OPTIONS)
    with FaultProxy(processes.address.host_port, delay_s=DELAY_S) as proxy:
        learner = Started(processes, "l0", SLEEPER, proxy)
        until((learner.root / STEPPING).exists, "the first step", processes)
        proxy.rate_bps = RATE_BPS
        moments = [_moment(processes, proxy, wanted) for wanted in (4, 16)]
        assert processes.end(learner.process) == 0
    assert processes.end(syncer) == 0
    (first_s, first_bytes), (last_s, last_bytes) = moments
    steps = json.loads((learner.root / MEASURED).read_text())["steps"]
    return Ran(
        step_s=statistics.mean(step["wall_s"] for step in steps),
        up_bps=8 * (last_bytes - first_bytes) / (last_s - first_s),
        commits=_commits(processes.run_dir)[4:16],
    )


def _moment(processes: Processes, proxy: FaultProxy, wanted: int) -> tuple[float, int]:
    """Return the time of this number of commits, and the bytes uploaded until then."""
    until(lambda: len(_commits(processes.run_dir)) >= wanted, f"{wanted} commits", processes)
    return time.monotonic(), proxy.bytes_up


def _commits(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_tape(run_dir / "tape" / "events.jsonl") if line["event"] == "commit"]


@pytest.fixture(scope="module")
def planned(ran: Ran) -> Forecast:
    numel = SLEEPER.numel
    machines = Machines(num_learners=1, link_bps=RATE_BPS / LINK_SHARE, rtt_s=2 * DELAY_S, step_s=ran.step_s)
    return forecast(
        Scenario(
            shapes={f"matrices.{k}": (WIDTH, WIDTH) for k in range(MATRICES)},
            mean_names=frozenset(),
            config=RunConfig(**OPTIONS),
            training=Training(num_parameters=numel, num_trainable=numel),
            fleet=machines,
            on_cpu=True,
        )
    )


def test_seconds_of_an_upload_and_its_merge(ran: Ran, planned: Forecast) -> None:
    """The time is measured from the message that a contribution is ready to its merge.

    That message shares the link with the bytes. If up to two of the proxy's chunks (0.07 s each) are before it, a
    shorter part of the upload is measured. So the second longest time counts instead of the median.
    """
    way = planned.exchange
    measured_s = sorted(line["round_s"] - line["collect_s"] for line in ran.commits)[-2]
    assert way.upload_s + way.merge_s + way.log_s == pytest.approx(measured_s, rel=TOLERANCE)
    assert way.upload_s > 0.9 * measured_s, "it is not the link that is measured"


def test_rate_of_a_learner_s_link(ran: Ran, planned: Forecast) -> None:
    scenario = planned.scenario
    predicted = bandwidth.learner_bps(planned.sizes, scenario.config, scenario.fleet)
    assert predicted == pytest.approx(ran.up_bps, rel=TOLERANCE)
