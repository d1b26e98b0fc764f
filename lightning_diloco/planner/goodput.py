"""Expected goodput in closed form.

    goodput = exp(-(down + lost) / T) * (1 - stall) * (1 - pauses)

Goodput is relative to a learner's own median speed (tokens per second of its median step), so all time by which a step
exceeds the median step is lost.

1. Failures of a learner are independent and occur every T (mtbf) on average, also during a restart. Without an mtbf
   there are none. The work of a moment counts if no failure occurs in the time `down` before it (the learner would be
   offline) or in the time `lost` after it (the work would never be merged).
2. down: time from a failure to the first step of the new process, including the download of the anchors. No other
   learner waits for it.
3. lost: on average half a period of H steps, plus the time in flight.
4. stall: every exchange costs the training thread one copy of the fragment and one pass over it.
5. Data parallel training stops as a whole, M times as often, until the failed part is back. The formula assumes in its
   favor that it loses no step.
6. pauses: time that a run without failures loses to validation and to steps longer than the median. The forecast
   cannot know it; measure it in a run without failures as 1 - steps * median step / time.
7. Learners have their own machines, so a restart does not slow other learners down.

Failures of the syncer and of a learner's network stop no learner. The result is an expectation. A short run can deviate
from it by chance, for example if several failures occur while a learner is already down.

Source: our choice; compared with real runs in `tests/bench/forecast.py`, and with simulated ones in a test.
"""

from __future__ import annotations

import math

from lightning_diloco.config import RunConfig
from lightning_diloco.planner.bandwidth import Exchange, Machines
from lightning_diloco.planner.memory import FragmentSizes, Training

RESTART_S = 120.0
STALL_CPU_S = 0.5e-9  # per value of a fragment: 1-3 ms for 6.25M parameters, measured
STALL_ACCELERATOR_S = 0.03e-9  # about 24 bytes at 0.8 TB/s


def stall_share(sizes: FragmentSizes, training: Training, exchange: Exchange, *, on_cpu: bool) -> float:
    """Return the share of a step that the hooks take on the training thread."""
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
    """Return the expected share of the planned tokens that is merged, 0..1.

    Args:
        config: the run's config.
        fleet: the run's machines.
        exchange: timing of an exchange.
        stall: share of a step that the hooks take, 0..1.
        mtbf_s: mean time between failures of one learner; None: no failures.
        restart_s: time from a failure to the first step of the new process, without the download of the anchors.
        pauses: share of time that a run without failures loses (rule 6), 0..1.
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
    """Return the expected goodput of one data parallel job over all learners, 0..1."""
    if mtbf_s is None:
        return 1 - pauses
    return (1 - pauses) * math.exp(-fleet.num_learners * (restart_s + exchange.adopt_s) / mtbf_s)
