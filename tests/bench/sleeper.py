"""A learner process for benches, with the real Trainer and strategy, which sleeps instead of computing.

1. A step sleeps, then updates one of the model's matrices slightly. An accelerator would also leave the host idle.
2. The link is measured from outside, around `Link.step` and `Link.settle`, the only calls that a step makes into it.
   `settle` completes the work of the hook before it, so its time is added to that hook.
3. `blocks` moves encoding and uploading to the training thread, which the bench must detect.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_diloco  # noqa: F401  registers "decoupled_diloco"
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.learner.exchange import FragmentExchange
from lightning_diloco.learner.link import Link
from lightning_diloco.learner.member import Member
from lightning_diloco.protocol import messages
from tests.bench.processes import MEASURED, STEPPING
from tests.quiet import QUIET


class Sleeping(L.LightningModule):
    """A list of square matrices, one of which is trained in each step.

    Args:
        numel: number of parameters, a multiple of width squared.
        width: width of the matrices.
        step_s: sleep time per step.
    """

    def __init__(self, numel: int, width: int, step_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrices = nn.ParameterList(torch.randn(width, width) for _ in range(round(numel / width**2)))
        self._step_s = step_s
        self._own = torch.Generator().manual_seed(zlib.crc32(os.environ.get("DILOCO_LEARNER", "").encode()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self._step_s)
        matrix = self.matrices[batch_idx % len(self.matrices)]
        noise = torch.randn(matrix.shape, generator=self._own)  # equal contributions would be refused
        return matrix.mul(batch.mean() + 0.1 * noise).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Journal:
    """Times steps and counts exchanges, by wrapping methods of the link and the device."""

    def __init__(self, root: Path) -> None:
        self.steps: list[dict[str, Any]] = []
        self.num_snapshots = self.num_landings = 0
        self._snapshots: list[int] = []
        self._landings: list[int] = []
        self._root = root
        self._left_s = 0.0

    def attach(self) -> None:
        """Wrap `Member.start`, `Link.step`, `Link.settle`, and the device's `snapshot` and `land`."""
        start, step, settle = Member.start, Link.step, Link.settle
        snapshot, land = CpuFragments.snapshot, CpuFragments.land

        def started(self_: Any, *args: Any) -> None:
            start(self_, *args)
            (self._root / STEPPING).touch()
            self._left_s = time.perf_counter()

        def stepped(self_: Any, *args: Any) -> None:
            entered_s, worked_s = time.perf_counter(), time.thread_time()
            step(self_, *args)
            self._wrote(entered_s, time.perf_counter(), time.thread_time() - worked_s)

        def settled(self_: Any) -> None:
            entered_s, worked_s = time.perf_counter(), time.thread_time()
            settle(self_)
            if self.steps:
                self.steps[-1]["hook_s"] += time.perf_counter() - entered_s
                self.steps[-1]["hook_cpu_s"] += time.thread_time() - worked_s

        def snapshotted(self_: Any, fragment: int) -> Any:
            self.num_snapshots += 1
            self._snapshots.append(fragment)
            return snapshot(self_, fragment)

        def landed(self_: Any, fragment: int, staged: Any) -> None:
            self.num_landings += 1
            self._landings.append(fragment)
            land(self_, fragment, staged)

        Member.start, Link.step, Link.settle = started, stepped, settled  # type: ignore[method-assign]
        CpuFragments.snapshot, CpuFragments.land = snapshotted, landed  # type: ignore[method-assign]

    def _wrote(self, entered_s: float, left_s: float, worked_s: float) -> None:
        self.steps.append(
            {
                "hook_s": left_s - entered_s,
                "hook_cpu_s": worked_s,
                "wall_s": left_s - self._left_s,
                "snapshots": self._snapshots,
                "landings": self._landings,
            }
        )
        self._snapshots, self._landings, self._left_s = [], [], left_s


class _BlockingLinks:
    """Makes links encode and upload on the training thread instead of other threads.

    Neither needs another thread of the learner, so the lock that the training thread holds causes no deadlock.
    """

    def __init__(self) -> None:
        self.num_jobs = 0

        def encode(freight: FragmentExchange, ready: messages.Ready) -> None:
            self.num_jobs += 1
            freight._wanted.add((ready.fragment, ready.seq))
            freight._encode(ready, freight._device.snapshot(ready.fragment))

        FragmentExchange.encode, FragmentExchange.upload = encode, FragmentExchange._upload  # type: ignore[method-assign]


def main() -> None:
    """Train according to the JSON in the first argument, and write the measurements."""
    given = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    root = Path(given["root"])
    root.mkdir(parents=True)
    journal = Journal(root)
    journal.attach()
    blocking = _BlockingLinks() if given["blocks"] else None
    trainer = L.Trainer(
        strategy="decoupled_diloco",
        accelerator="cpu",
        devices=1,
        max_steps=given["num_steps"],
        default_root_dir=root,
        **QUIET,
    )
    samples = DataLoader(torch.ones(given["num_steps"] * 8, 1), batch_size=1)
    trainer.fit(Sleeping(given["numel"], given["width"], given["step_s"]), samples)
    assert blocking is None or blocking.num_jobs >= journal.num_snapshots, "the control does not control anything"
    measured = {name: getattr(journal, name) for name in ("steps", "num_snapshots", "num_landings")}
    (root / MEASURED).write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
