"""Collectives between devices in one exchange: python -m tests.xla.collectives FOLDER ROWSxCOLUMNS:DIM...

Each parameter is sharded over all devices along its dimension. The program prints, as JSON, the elements of the largest
collective operation in the programs compiled for each. XLA_FLAGS must make XLA write these programs to the folder as
text.
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
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.xla import ops as xla
from lightning_diloco.devices.xla.fragments import XlaFragments

BLOCK_SIZE = 64
MADE = "*after_optimizations.txt"
COLLECTIVE = re.compile(r"= (.*?) (?:all-gather|all-to-all|all-reduce|reduce-scatter|collective-[a-z]+)(?:-start)?\(")


def largest_collective(program: str) -> int:
    """Return its number of elements."""
    shapes = [shape for made in COLLECTIVE.findall(program) for shape in re.findall(r"\[([\d,]*)\]", made)]
    return max((prod(int(size) for size in shape.split(",") if size) for shape in shapes), default=0)


def exchange(shape: tuple[int, int], dim: int, programs: Path) -> dict[str, int]:
    """Make a contribution and its landing, for each half of a parameter."""
    param = torch.nn.Parameter(torch.randn(shape).to("xla"))
    xla.shard(param, dim)
    xla.sync()
    earlier = set(programs.glob(MADE))

    plan = FragmentPlan.balanced({"matrix": shape}, num_fragments=2, max_slice_numel=prod(shape))
    device = XlaFragments(plan, {"matrix": param}, RunConfig(block_size=BLOCK_SIZE), LearnerConfig())
    for p in range(2):
        device.adopt(p, device.local_values(p))
        payload = device.encode(device.snapshot(p)).payload
        device.land(p, device.stage(p, Update(None, [payload], payload)))
    largest = max(largest_collective(program.read_text()) for program in set(programs.glob(MADE)) - earlier)
    return {"largest_collective": largest, "fragment": plan.numel(0)}


if __name__ == "__main__":
    xla.use_mesh()
    found = {}
    for case in sys.argv[2:]:
        rows, columns, dim = map(int, re.split("[x:]", case))
        found[case] = exchange((rows, columns), dim, Path(sys.argv[1]))
    print(json.dumps(found))
