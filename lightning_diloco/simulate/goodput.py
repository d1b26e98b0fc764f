"""The expected goodput, in closed form.

    goodput = T / (T + down) * (1 - lost / T) * (1 - stall)

1. Failures of a learner are independent and come every T (mtbf) on average; none if it is not given.
2. After one, the learner is down until its process stands again and has adopted the anchors; nobody waits for it.
3. With it goes what it had not merged: on average half a period of H steps, and what was in flight.
4. Every exchange costs the training thread one copy and one pass over the fragment.
5. Data parallel stops as a whole, M times as often, until the failed part is back; here it even loses no step.

The syncer's own failures stop no learner. Source: our choice.
"""

from __future__ import annotations

from lightning_diloco.config import RunConfig
from lightning_diloco.simulate.bandwidth import Exchange, Machines
from lightning_diloco.simulate.memory import FragmentSizes, Training

RESTART_S = 120.0
STALL_CPU_S = 0.5e-9  # per value of a fragment: 1-3 ms for 6.25M parameters, measured
STALL_ACCELERATOR_S = 0.03e-9  # about 24 bytes at 0.8 TB/s


def stall_share(sizes: FragmentSizes, training: Training, exchange: Exchange, *, on_cpu: bool) -> float:
    """Share of a step that the hooks take on the training thread."""
    per_value_s = STALL_CPU_S if on_cpu else STALL_ACCELERATOR_S
    return min(1.0, per_value_s * sizes.numel / training.devices / exchange.period_s)


def expected_goodput(
    config: RunConfig, fleet: Machines, exchange: Exchange, *, stall: float, mtbf_s: float | None, restart_s: float
) -> float:
    """Share of the planned tokens that is merged, 0..1.

    Args:
        config: of the run.
        fleet: of the run.
        exchange: its timing.
        stall: share of a step, 0..1.
        mtbf_s: mean time between failures of one learner; None: no failures.
        restart_s: from a failure to the process that joins again.
    """
    if mtbf_s is None:
        return 1 - stall
    down_s = restart_s + exchange.adopt_s
    lost_s = config.sync_every * fleet.step_s / 2 + exchange.landing_s
    return mtbf_s / (mtbf_s + down_s) * max(0.0, 1 - lost_s / mtbf_s) * (1 - stall)


def data_parallel_goodput(fleet: Machines, exchange: Exchange, *, mtbf_s: float | None, restart_s: float) -> float:
    """The same for one job over all learners that waits for each of them."""
    if mtbf_s is None:
        return 1.0
    fleet_mtbf_s = mtbf_s / fleet.num_learners
    return fleet_mtbf_s / (fleet_mtbf_s + restart_s + exchange.adopt_s)
