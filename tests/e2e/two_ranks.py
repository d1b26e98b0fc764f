"""One rank of a learner without a Trainer: it joins, reports it, waits for the file DIR/go, and makes its steps.

    two_ranks.py DIR RANK SIZE LINE STEPS CUT

LINE is the `host:port` over which this rank connects to the syncer, "cut", or "direct". With "direct", it writes the
bytes of the contributions that it has sent to DIR/sent.RANK, by the syncer's `host:port`. It makes STEPS steps; 0:
until DIR/stop exists. CUT is the part of the parameters that it holds: "whole", or "rows". With "whole", it writes the
digests of its anchors to DIR/digests.RANK.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_diloco.config import LearnerConfig
from lightning_diloco.core.digest import digest
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.devices.part import Box, CpuPart
from lightning_diloco.errors import TransportError
from lightning_diloco.learner.ranks import partial_uploads
from lightning_diloco.learner.ranks.follower import Follower
from lightning_diloco.learner.ranks.group import Ranks
from lightning_diloco.learner.ranks.leader import Leader
from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice
from lightning_diloco.learner.ranks.sharded_device import ShardedDevice
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.storage.files import write_whole
from lightning_diloco.transport.address import JoinAddress, split_host_port
from lightning_diloco.transport.base import Bulk, Json
from lightning_diloco.transport.flight import FlightConnection

SHAPES = {"first": (1024, 512), "second": (1024, 512)}
PACE_S, TOKENS = 0.01, 3
ODD = 7  # so that ranks do not begin at a quantization block


sent: Counter[str] = Counter()


class Counted(FlightConnection):
    """A connection that counts the sent bytes."""

    def __init__(self, address: JoinAddress, file: Path) -> None:
        super().__init__(address)
        self._syncer, self._file = address.host_port, file

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        """See `Connection.put`."""
        answer = super().put(bulk, deadline_s=deadline_s)
        if bulk.header["what"] == "contribution":
            sent[self._syncer] += bulk.payload.nbytes
            write_whole(self._file, json.dumps(sent).encode())
        return answer


def main(folder: Path, rank: int, size: int, line: str, *, steps: int, cut: str) -> None:
    """Join, train, leave."""
    logging.basicConfig(level=logging.WARNING)
    partial_uploads.ALONE_S = 10.0
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    generator = torch.Generator().manual_seed(1)
    params = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    boxes, kind = [], ReplicatedDevice
    if cut == "rows":
        boxes = [{name: _rows(shape, r, size) for name, shape in SHAPES.items()} for r in range(size)]
        kind = ShardedDevice
        params = {name: nn.Parameter(_cut(param, *boxes[rank][name])) for name, param in params.items()}

    def connect(address: JoinAddress) -> FlightConnection:
        if line == "direct":
            return Counted(address, folder / f"sent.{rank}")
        if line == "cut":
            raise TransportError("this rank has no line")
        host, port = split_host_port(line)
        return FlightConnection(replace(address, host=host, port=port))

    own = LearnerConfig(learner=os.environ.get("DILOCO_LEARNER", "l0"))
    role = Follower if rank else Leader
    link = role({}, own, folder, ranks=Ranks(), boxes=boxes, kind=kind, connect=connect)
    description = ModelDescription(dict(SHAPES), frozenset(), {}, "tokens")
    if not boxes:
        link.start(description, lambda plan, config: CpuFragments(plan, params, config, own))
    else:
        link.start(description, lambda plan, config: CpuPart(plan, params, config, own, boxes[rank]))
    print("joined", flush=True)
    while not (folder / "go").exists():
        time.sleep(PACE_S)
    for number in itertools.count(1):
        link.begin_step(TOKENS)
        link.settle()
        with torch.no_grad():
            for param in params.values():
                param.mul_(0.999)
        time.sleep(PACE_S)
        link.step(0, "tokens")
        is_over = torch.tensor((folder / "stop").exists() if steps == 0 else number == steps)
        dist.broadcast(is_over, 0)
        if is_over:
            break
    if link.finish() and rank == 0:
        link.report(0.0)
    if not boxes:
        digests = [digest(link.device.anchor(p)) for p in range(link.plan.num_fragments)]
        (folder / f"digests.{rank}").write_text(" ".join(digests))
    link.close()


def _rows(shape: tuple[int, int], rank: int, size: int) -> Box:
    first, last = (ODD + (shape[0] - ODD) * r // size if r else 0 for r in (rank, rank + 1))
    return (first, 0), (last - first, shape[1])


def _cut(param: torch.Tensor, firsts: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return param.detach()[firsts[0] : firsts[0] + sizes[0]].clone()


if __name__ == "__main__":
    given, rank, size, line, steps, cut = sys.argv[1:]
    main(Path(given), int(rank), int(size), line, steps=int(steps), cut=cut)
