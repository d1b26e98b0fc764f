"""A learner process with a small model and the real link. It writes its final values to the file named by --out."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch

from lightning_diloco.config import LearnerConfig
from lightning_diloco.core.digest import digest
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.errors import DiLoCoError
from lightning_diloco.learner.member import Member
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.transport.flight import FlightConnection

SHAPES = {"embedding": (64, 16), "hidden": (48, 32), "bias": (48,)}
TOKENS = 7


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=Path, help="train until this file exists")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", default="{}", help="run options, JSON")
    parser.add_argument("--deadline-s", type=float, default=10.0, help="of calls over the network")
    parser.add_argument("--drain-s", type=float, default=20.0)
    parser.add_argument("--verdict", type=Path, help="the last one to leave evaluates until this file exists")
    given = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(levelname)s %(message)s")
    torch.manual_seed(given.seed)
    params = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    target = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    config = LearnerConfig(drain_s=given.drain_s)
    connect = partial(FlightConnection, control_deadline_s=given.deadline_s)
    link = Member(json.loads(given.options), config, given.out.parent, connect=connect)
    steps, hooks_s = 0, [0.0]
    try:
        description = ModelDescription(SHAPES, frozenset({"embedding"}), {}, "tokens")
        link.start(description, lambda plan, run: CpuFragments(plan, params, run, config))
        while not given.until.exists():
            began_s = time.monotonic()
            link.settle()
            hooks_s.append(time.monotonic() - began_s)
            with torch.no_grad():
                for name, param in params.items():
                    param.lerp_(target[name], 0.01)
            time.sleep(0.01)
            began_s = time.monotonic()
            link.step(TOKENS, "tokens")
            hooks_s.append(time.monotonic() - began_s)
            steps += 1
        is_last = link.finish()
        if is_last:
            while given.verdict is not None and not given.verdict.exists():
                time.sleep(0.01)
            link.report(0.5)
        link.close()
        held = {
            "digests": [digest(link.device.anchor(p)) for p in range(link.plan.num_fragments)],
            "landed": [f.landed for f in link._machine.fragments],
            "steps": steps,
            "is_last": is_last,
            "longest_hook_s": max(hooks_s),
            "longest_hooks_s": sorted(hooks_s, reverse=True)[:50],
            "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("diloco")],
        }
        given.out.write_text(json.dumps(held))
    except DiLoCoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 3
    finally:
        link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
