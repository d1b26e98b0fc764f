"""Simulates a plan: the goodput of `diloco plan --simulate`, with the times and failures that the plan assumes."""

from __future__ import annotations

from typing import Any

from lightning_diloco.planner.bandwidth import Exchange
from lightning_diloco.planner.plan import Forecast
from lightning_diloco.simulate.chips import Chips
from lightning_diloco.simulate.goodput import Scenario, simulate
from lightning_diloco.simulate.settings import Network

NUM_DEATHS = 30  # on average: the lost share is then off by a fifth
_NEVER_S = 1e15


def durations(exchange: Exchange, rtt_s: float) -> dict[str, Any]:
    """Return the options of a `Scenario` that follow from an exchange, whose merge and commit take half each."""
    return {
        "network": Network(latency_s=rtt_s / 2, upload_s=exchange.upload_s, download_s=exchange.download_s),
        "merge_s": (exchange.merge_s + exchange.log_s + exchange.standby_s) / 2,
    }


def simulated_goodput(found: Forecast) -> float:
    """Return the share of the planned tokens that a simulation merges, 0..1; see `planner.goodput.expected_goodput`."""
    plan, fleet, exchange = found.scenario, found.scenario.fleet, found.exchange
    scenario = Scenario(
        num_learners=fleet.num_learners,
        chips=Chips(count=plan.training.devices, slice_chips=1, mtbi_s=_NEVER_S),
        step_s=(fleet.step_s,),
        mtbf_s=plan.mtbf_s,
        rejoin_s=plan.restart_s + exchange.adopt_s,
        duration_s=None if plan.mtbf_s is None else NUM_DEATHS * plan.mtbf_s / fleet.num_learners,
        config=plan.config,
        **durations(exchange, fleet.rtt_s),
    )
    return simulate(scenario).goodput * (1 - found.stall) * (1 - plan.pauses)
