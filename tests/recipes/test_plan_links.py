"""What `diloco plan` predicts of links, against a real learner behind a capped link, within 15 %.

A proxy lets through exactly its rate, as a network never does: it is the usable part of a link (LINK_SHARE of it).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable
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
from tests.bench.processes import MEASURED, START_S, STEPPING, Sleeper, _join_address, _process, _start_of, _through
from tests.bench.processes import ROOT as REPOSITORY

TOLERANCE = 0.15
RATE_BPS, DELAY_S = 8e6, 0.02
WIDTH, MATRICES = 256, 32  # 2.1M parameters: 0.5 s for a fragment
SLEEPER = Sleeper(step_s=0.1, num_steps=240, numel=MATRICES * WIDTH**2, width=WIDTH)
OPTIONS = {"sync_every": 40, "num_fragments": 4, "overlap": 4}

pytestmark = pytest.mark.slow


@dataclass
class Ran:
    """What was seen of the run.

    Args:
        step_s: mean time of an inner step.
        up_bps: at the socket, between two commits far apart.
        commits: of the tape, those in between.
    """

    step_s: float
    up_bps: float
    commits: list[dict[str, Any]]


def until(reached: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while not reached():
        assert process.poll() is None, "a process has ended"
        assert time.monotonic() < deadline_s, "it takes too long"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("capped")
    run_dir, root = folder / "run", folder / "l0"
    words = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    syncer_argv = ["-m", "lightning_diloco.cli.main", "syncer", "--run-dir", str(run_dir), "--listen", "127.0.0.1:0"]
    sleeper_argv, environment = _start_of(SLEEPER, root, "")
    python = sleeper_argv[0]
    with _process([python, *syncer_argv, "--expect", "1", *words], folder, {}, folder / "syncer.out") as syncer:
        address = _join_address(run_dir / "join", syncer)
        with FaultProxy(address.host_port, delay_s=DELAY_S) as proxy:
            environment["DILOCO_JOIN"] = _through(proxy, address)
            with _process(sleeper_argv, REPOSITORY, environment, folder / "l0.out") as learner:
                until((root / STEPPING).exists, learner)
                proxy.rate_bps = RATE_BPS
                moments = [_moment(run_dir, proxy, wanted, learner) for wanted in (4, 16)]
                assert learner.wait(START_S) == 0, (folder / "l0.out").read_text()
        assert syncer.wait(START_S) == 0, (folder / "syncer.out").read_text()
    (first_s, first_bytes), (last_s, last_bytes) = moments
    steps = json.loads((root / MEASURED).read_text())["steps"]
    return Ran(
        step_s=statistics.mean(step["wall_s"] for step in steps),
        up_bps=8 * (last_bytes - first_bytes) / (last_s - first_s),
        commits=_commits(run_dir)[4:16],
    )


def _moment(run_dir: Path, proxy: FaultProxy, wanted: int, learner: subprocess.Popen[bytes]) -> tuple[float, int]:
    """When there are so many commits, and what went up until then."""
    until(lambda: len(_commits(run_dir)) >= wanted, learner)
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
    """From the word that a contribution is ready to its merge.

    That word shares the link with the bytes: where up to two of the proxy's chunks (0.07 s each) were before it, less
    of the upload is seen. So not the median counts, but the longest but one.
    """
    way = planned.exchange
    measured_s = sorted(line["round_s"] - line["collect_s"] for line in ran.commits)[-2]
    assert way.upload_s + way.merge_s + way.log_s == pytest.approx(measured_s, rel=TOLERANCE)
    assert way.upload_s > 0.9 * measured_s, "it is not the link that is measured"


def test_rate_of_a_learner_s_link(ran: Ran, planned: Forecast) -> None:
    scenario = planned.scenario
    predicted = bandwidth.learner_bps(planned.sizes, scenario.config, scenario.fleet)
    assert predicted == pytest.approx(ran.up_bps, rel=TOLERANCE)
