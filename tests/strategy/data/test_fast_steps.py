"""Learners whose steps are faster than leases arrive, with real links, syncer and lease table in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_diloco.protocol.data_ranges import Catalogue, Lease
from lightning_diloco.strategy.data.range_batches import RangeBatches, RangeLoader
from tests.learner.fleet import Fleet, Learner, assert_exact

NUM_STEPS = 600
RANGE_SIZE, BATCH_SIZE = 3, 4


class Numbers:
    catalogue = Catalogue("numbers", 1, 200)

    def read(self, lease: Lease) -> tuple[torch.Tensor, bool]:
        numbers = torch.arange(lease.index * RANGE_SIZE, (lease.index + 1) * RANGE_SIZE)
        return numbers[lease.skip :], False


def train(learner: Learner) -> None:
    """Make steps as fast as possible."""
    learner.join()
    batches = RangeBatches(Numbers(), learner.link.lease(Numbers.catalogue), batch_size=BATCH_SIZE)
    loader = RangeLoader(batches, collate=torch.Tensor.tolist)
    try:
        for _, batch in zip(range(NUM_STEPS), loader, strict=False):
            learner.link.settle()
            with torch.no_grad():
                for name, param in learner.params.items():
                    param.lerp_(learner.target[name], 0.02)
            loader.trained(len(batch))
            learner.link.step(len(batch), "samples")
        learner.finish()
    finally:
        loader.close()
        learner.link.close()


def test_nothing_is_repeated_in_an_undisturbed_run_of_fast_steps(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        learners = [fleet.learner(name, unit="samples") for name in ("a", "b")]
        for learner in learners:
            learner.result = learner.aside(lambda learner=learner: train(learner))  # type: ignore[misc]
        for learner in learners:
            learner.result.result(timeout=60.0)  # type: ignore[union-attr]
        summary = fleet.stop()
    assert_exact(summary)
    assert summary["fleet_tokens"] == 2 * NUM_STEPS * BATCH_SIZE
    assert summary["tokens_repeated"] == 0
