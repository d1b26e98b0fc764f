"""One rank of a learner without a Trainer: it joins, says so, waits for the file DIR/go, and makes its steps.

    two_ranks.py DIR RANK SIZE LINE STEPS

LINE is the `host:port` over which this rank speaks with the syncer, or "cut". Digests go to DIR/digests.RANK.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_diloco.config import LearnerConfig
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.errors import TransportError
from lightning_diloco.runtime.follower import FollowerLink
from lightning_diloco.runtime.leader import LeaderLink
from lightning_diloco.runtime.model import ModelDescription
from lightning_diloco.runtime.ranks import Ranks
from lightning_diloco.transport.address import JoinAddress, split_host_port
from lightning_diloco.transport.flight import FlightConnection

SHAPES = {"first": (1024, 512), "second": (1024, 512)}
PACE_S, TOKENS = 0.01, 3


def main(folder: Path, rank: int, size: int, line: str, steps: int) -> None:
    """Join, train, leave."""
    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    generator = torch.Generator().manual_seed(1)
    params = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}

    def connect(address: JoinAddress) -> FlightConnection:
        if line == "cut":
            raise TransportError("this rank has no line")
        host, port = split_host_port(line)
        return FlightConnection(replace(address, host=host, port=port))

    ranks, own = Ranks(), LearnerConfig(learner="l0")
    if rank == 0:
        link = LeaderLink({}, own, folder, ranks=ranks, connect=connect)
    else:
        link = FollowerLink(ranks, connect=connect)  # type: ignore[assignment]
    description = ModelDescription(dict(SHAPES), frozenset(), {}, "tokens")
    link.start(description, lambda plan, config: CpuFragments(plan, params, config, own))
    print("joined", flush=True)
    while not (folder / "go").exists():
        time.sleep(PACE_S)
    for _ in range(steps):
        link.begin_step(TOKENS)
        with torch.no_grad():
            for param in params.values():
                param.mul_(0.999)
        time.sleep(PACE_S)
        link.step(0, "tokens")
    if link.finish() and rank == 0:
        link.report(0.0)
    digests = [link.device.digest(p) for p in range(link.plan.num_fragments)]
    (folder / f"digests.{rank}").write_text(" ".join(digests))
    link.close()


if __name__ == "__main__":
    given, rank, size, line, steps = sys.argv[1:]
    main(Path(given), int(rank), int(size), line, int(steps))
