"""The expected goodput, in closed form.

    goodput = exp(-(down + lost) / T) * (1 - stall) * (1 - pauses)

It is measured against a learner's own median speed (tokens per second of its median step), so whatever makes a step
longer than that one is lost.

1. Failures of a learner are independent and come every T (mtbf) on average, at any time, that of its restart included;
   none if it is not given. So a moment counts if there was no failure in the `down` before it, or the learner would
   not be there, and none in the `lost` after it, or what it did would never be merged.
2. down: until its new process makes its first step, the download of the anchors included; nobody waits for it.
3. lost: on average half a period of H steps, and the time in flight.
4. Every exchange costs the training thread one copy and one pass over the fragment.
5. Data parallel stops as a whole, M times as often, until the failed part is back; here it even loses no step.
6. pauses: what a run without failures loses, too, to validation, and to steps longer than the median one. Nothing here
   can know it; whoever has a run without failures can read it off: 1 - steps * median step / time.
7. Learners have machines of their own: one that starts again slows no other down.

The syncer's own failures and a learner's cut network stop no learner. It is an expectation: over a short run chance
counts as much, as failures come in a bunch, while a learner is down already, or do not.

Source: our choice; compared with real runs in `tests/bench/forecast.py`.
"""

from __future__ import annotations

import math

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
    config: RunConfig,
    fleet: Machines,
    exchange: Exchange,
    *,
    stall: float,
    mtbf_s: float | None,
    restart_s: float,
    pauses: float = 0.0,
) -> float:
    """Share of the planned tokens that is merged, 0..1.

    Args:
        config: of the run.
        fleet: of the run.
        exchange: its timing.
        stall: share of a step, 0..1.
        mtbf_s: mean time between failures of one learner; None: no failures.
        restart_s: from a failure to the first step of the new process, the download of the anchors left out.
        pauses: share of the time without failures that is not steps of the median length, 0..1.
    """
    steady = (1 - stall) * (1 - pauses)
    if mtbf_s is None:
        return steady
    down_s = restart_s + exchange.adopt_s
    lost_s = config.sync_every * fleet.step_s / 2 + exchange.landing_s
    return math.exp(-(down_s + lost_s) / mtbf_s) * steady


def data_parallel_goodput(
    fleet: Machines, exchange: Exchange, *, mtbf_s: float | None, restart_s: float, pauses: float = 0.0
) -> float:
    """The same for one job over all learners that waits for each of them."""
    if mtbf_s is None:
        return 1 - pauses
    return (1 - pauses) * math.exp(-fleet.num_learners * (restart_s + exchange.adopt_s) / mtbf_s)
