"""A learner of the fleets bench: the real link of a learner, without a Trainer, which sleeps in each step.

1. It imports neither Lightning nor a model, so that a machine can hold 64 of them.
2. A step sleeps, moves all parameters a little, and one matrix in a direction of its own. Step times differ by a few
   percent.
3. Hooks are timed around the link's calls. The last one to leave says that it did not validate the anchor.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from pathlib import Path

import torch

from lightning_diloco.config import LearnerConfig
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.learner.member import Member
from lightning_diloco.manifest import ModelDescription

TOKENS = 100
JITTER = 0.02


def main() -> None:
    """Train according to the JSON in the first argument, and write the measurements."""
    given = json.loads(sys.argv[1])
    root, until, width = Path(given["root"]), Path(given["until"]), given["width"]
    torch.manual_seed(0)
    shapes = {f"w{k}": (width, width) for k in range(given["num_matrices"])}
    params = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    config = LearnerConfig(drain_s=120.0)
    link = Member({}, config, root)
    model = ModelDescription(shapes, frozenset(), {}, "tokens")
    link.start(model, lambda plan, run: CpuFragments(plan, params, run, config))
    own = torch.Generator().manual_seed(int(given["seed"]))
    pace = random.Random(given["seed"])
    hooks, steps, began_s = [], 0, time.monotonic()
    while not until.exists():
        time.sleep(given["step_s"] * pace.uniform(1 - JITTER, 1 + JITTER))
        entered_s = time.monotonic()
        link.settle()
        settled_s = time.monotonic()
        with torch.no_grad():
            torch._foreach_add_(list(params.values()), 1e-4)  # a contribution of zeros would look broken
            params[f"w{steps % len(params)}"].add_(torch.randn(width, width, generator=own), alpha=0.01)
        stepped_s = time.monotonic()
        link.step(TOKENS, "tokens")
        left_s = time.monotonic()
        hooks.append((left_s, left_s - stepped_s + settled_s - entered_s))
        steps += 1
    cpu_s, wall_s = sum(os.times()[:2]), time.monotonic() - began_s
    if link.finish():
        link.report(None, "it sleeps")
    link.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    held = {"steps": steps, "hooks": hooks, "cpu_s": cpu_s, "wall_s": wall_s, "peak_bytes": peak}
    (root / f"{link.learner_id}.json").write_text(json.dumps(held))


if __name__ == "__main__":
    main()
