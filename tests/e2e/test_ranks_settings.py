"""Settings of a Trainer have the same effect in a learner of two ranks as on one device with the same batches.

Gradients are accumulated and clipped by their norm, and a schedule sets the learning rate, all in one run: in float32,
and under autocast. `Trainer(gradient_clip_val=...)` clips with DDP and with FSDP2, whose gradients are DTensors: torch
knows their norm over all ranks. With FSDP, Lightning refuses to clip, and users call the clipping of torch's FSDP.

Allowed differences between layouts:

1. Clipped gradients move parameters by at most `WAY`. If the direction of each step has a relative error, the final
   parameters differ by at most this share of `WAY`. Losses fall, so differences do not grow during training.
2. bfloat16 has 8 bits. Rounding changes a value by up to 2**-9 of itself. The sum of values that two ranks have rounded
   has the same error, and differs from the value of one device by up to twice as much. FSDP also rounds batches and
   reduced values, which autocast does not do; this doubles the difference.
3. In float32, gradients agree, but the syncer rounds merged values to bfloat16. Sums in another order may round a value
   to its other neighbour. The same bound holds for parameters; losses and norms agree much better.
"""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from tests.e2e.conftest import Processes
from tests.e2e.test_ranks import PACED, furthest, summary
from tests.e2e.trainer import RATE, decayed

pytestmark = pytest.mark.slow

NUM_STEPS, NUM_BATCH, ACCUMULATED, CLIP = 24, 8, 2, 0.05
SETTINGS = ("--accumulate", ACCUMULATED, "--clip", CLIP, "--decays", "--steps", NUM_STEPS)
LAYOUTS = {
    name: ("--devices", 2, "--inner", inner)
    for name, inner in {"ddp": "auto", "fsdp": "fsdp", "fsdp2": "fsdp2"}.items()
}
RATES = [RATE * decayed(step) for step in range(NUM_STEPS)]
WAY = CLIP * sum(RATES)
OF_BFLOAT16 = 2**-8
ROUNDINGS = {"ddp": 1, "fsdp": 2, "fsdp2": 1}
IN_FLOAT32 = 1e-5  # with 24 bits, some sums of hundreds of values, and parameters apart by 3.


@pytest.mark.parametrize(
    ("precision", "apart"),
    [("32-true", IN_FLOAT32), pytest.param("bf16-mixed", OF_BFLOAT16, marks=pytest.mark.thorough)],
)
def test_accumulation_clipping_precision_and_schedule_are_those_of_one_device(
    processes: Processes, precision: str, apart: float
) -> None:
    for name, layout in {"one": (), **LAYOUTS}.items():
        assert processes.end(processes.trainer(name, *PACED, *SETTINGS, "--precision", precision, *layout)) == 0

    (one,) = processes.ranks_held("one")
    assert min(one["norms"]) > 2 * CLIP  # each step is clipped
    for name in LAYOUTS:
        ranks, within = processes.ranks_held(name), apart * ROUNDINGS[name]
        for rank in ranks:
            assert (rank["steps"], rank["computed_in"]) == (NUM_STEPS, one["computed_in"])
            assert rank["rates"] == one["rates"] == pytest.approx(RATES)
            assert rank["norms"] == pytest.approx(one["norms"], rel=within)
            assert furthest(one, rank) < OF_BFLOAT16 * WAY
        assert sorted(chain(*(rank["seen"] for rank in ranks))) == sorted(one["seen"])
        losses = torch.tensor([rank["losses"] for rank in ranks]).mean(0)
        assert losses.tolist() == pytest.approx(one["losses"], rel=within)
        found = summary(processes, name)
        assert (found["rounds"], found["ledger_exact"]) == (summary(processes, "one")["rounds"], True)
        tokens = NUM_STEPS * ACCUMULATED * NUM_BATCH * len(found["versions"])
        assert found["tokens_seen"] == found["tokens_merged"] == tokens
    assert one["computed_in"] == ["torch.float32" if precision == "32-true" else "torch.bfloat16"]
