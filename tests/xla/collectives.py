"""What passes between devices in one exchange: python -m tests.xla.collectives ROWS COLUMNS DIM MAX_SLICE_NUMEL FOLDER.

One parameter lies over all devices along a dimension. Prints the elements of the largest collective operation in the
programs that were compiled after training's, as JSON; XLA_FLAGS must have XLA write them to the folder as text.
"""

from __future__ import annotations

import json
import re
import sys
from math import prod
from pathlib import Path

import torch

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices import xla
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.xla_fragments import XlaFragments

BLOCK_SIZE = 64
COLLECTIVE = re.compile(r"= (.*?) (?:all-gather|all-to-all|all-reduce|reduce-scatter|collective-[a-z]+)(?:-start)?\(")


def largest_collective(program: str) -> int:
    """Elements."""
    shapes = [shape for made in COLLECTIVE.findall(program) for shape in re.findall(r"\[([\d,]*)\]", made)]
    return max((prod(int(size) for size in shape.split(",") if size) for shape in shapes), default=0)


if __name__ == "__main__":
    rows, columns, dim, max_slice_numel = map(int, sys.argv[1:5])
    programs = Path(sys.argv[5])
    xla.use_mesh()
    param = torch.nn.Parameter(torch.randn(rows, columns).to("xla"))
    xla.shard(param, dim)
    xla.sync()
    earlier = set(programs.glob("*after_optimizations.txt"))

    plan = FragmentPlan.balanced({"matrix": (rows, columns)}, num_fragments=2, max_slice_numel=max_slice_numel)
    device = XlaFragments(plan, {"matrix": param}, RunConfig(block_size=BLOCK_SIZE), LearnerConfig())
    for p in range(2):
        device.adopt(p, device.local_values(p))
        payload = device.encode(device.snapshot(p)).payload
        device.land(p, device.stage(p, Update(None, [payload], payload)))
    made = sorted(set(programs.glob("*after_optimizations.txt")) - earlier)
    largest = max(largest_collective(program.read_text()) for program in made)
    print(json.dumps({"largest_collective": largest, "fragment": plan.numel(0)}))
