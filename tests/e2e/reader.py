"""A learner process that leases its data, with a small model and the real link. It records the samples of each step."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from lightning_diloco.config import LearnerConfig
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.learner.member import Member
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.protocol.data_ranges import Catalogue, Lease
from lightning_diloco.strategy.data.range_batches import RangeBatches, RangeLoader

SHAPES = {"hidden": (48, 32), "bias": (48,)}
SIZES, RANGE_SIZE, BATCH_SIZE = (500, 130), 24, 5


class Numbers:
    """Two sources of unknown length; a sample consists of its epoch, its source and its number."""

    catalogue = Catalogue("numbers", len(SIZES), None)

    def read(self, lease: Lease) -> tuple[torch.Tensor, bool]:
        numbers = torch.arange(SIZES[lease.source])[lease.index * RANGE_SIZE :][:RANGE_SIZE]
        where = torch.tensor([lease.epoch, lease.source]).expand(len(numbers), 2)
        return torch.cat([where, numbers[:, None]], 1)[lease.skip :], len(numbers) < RANGE_SIZE


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="one line for each step")
    parser.add_argument("--until", type=Path, required=True, help="train until this file exists")
    given = parser.parse_args()
    torch.manual_seed(0)
    params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    config = LearnerConfig(drain_s=20.0)
    link = Member({}, config, given.out.parent)
    link.start(
        ModelDescription(SHAPES, frozenset(), {}, "samples"), lambda plan, run: CpuFragments(plan, params, run, config)
    )
    batches = RangeBatches(Numbers(), link.lease(Numbers.catalogue), batch_size=BATCH_SIZE)
    loader = RangeLoader(batches, collate=torch.Tensor.tolist)
    try:
        with given.out.open("a") as out:
            for batch in loader:
                link.settle()
                with torch.no_grad():
                    for param in params.values():
                        param.add_(0.01 * torch.rand_like(param))  # equal contributions would be refused
                time.sleep(0.01)
                loader.trained(len(batch))
                # Recorded before the step can be merged, so that all merged samples are known.
                print(json.dumps({"session": link._session, "samples": batch}), file=out, flush=True)
                link.step(len(batch), "samples")
                if given.until.exists():
                    break
        if link.finish():
            link.report(0.5)
    finally:
        loader.close()
        link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
