"""Fragments of a learner whose parameters are on one accelerator, which is any device that torch has a module for.

1. The training thread only enqueues work. Its copies and landings run on its current stream, in order with training.
2. The link thread uses a side stream and synchronizes the host with it before it passes a result on. Its results can
   therefore be used on any stream without further synchronization.
3. An event marks the last time the training stream used a buffer. The link thread's stream waits for this event before
   it starts and whenever it takes a recycled buffer. The training thread never waits.
4. Host transfers use pinned memory, because without it copies do not overlap with computation.
5. Some accelerators lack side streams or pinned memory (`streams.py`). Without side streams, the link thread's work
   runs in order with training and delays it. Nothing else changes.
6. The anchors of all learners must be equal bit for bit. The constructor therefore refuses an accelerator whose sums
   differ from the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import Decoder, encode
from lightning_diloco.devices.dense import DenseFragments
from lightning_diloco.devices.streams import Streams
from lightning_diloco.errors import ConfigError


class AcceleratorFragments(DenseFragments):
    """A `FragmentDevice` on one accelerator; see `DenseFragments` for the arguments."""

    def __init__(
        self, plan: FragmentPlan, params: Mapping[str, Tensor], config: RunConfig, learner: LearnerConfig
    ) -> None:
        device = next(iter(params.values())).device
        if learner.anchor_device == "host":
            raise ConfigError(
                f"anchor_device='host' on {device.type}: must be 'device' there, only XLA learners keep anchors in "
                "host memory; remove the option and allow four bytes of device memory per parameter"
            )
        _check_arithmetic(device, config)
        self._streams = Streams(device)
        self._progress: Any = None  # an event
        super().__init__(plan, params, config, learner)
        self._side = self._streams.side()
        self._mark()

    def _mark(self) -> None:
        self._progress = self._streams.recorded()  # a new event each time: the link thread may still use the last

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with self._streams.on(self._side):
            self._wait_for_training()
            yield
            self._streams.synchronize(self._side)

    def _take(self) -> Tensor:
        buffer = super()._take()
        self._wait_for_training()
        return buffer

    def _wait_for_training(self) -> None:
        """Make the current stream wait, but not the host; this has no effect on the training stream itself."""
        if self._progress is not None:
            self._streams.wait(self._progress)

    def _to_host(self, tensor: Tensor) -> Tensor:
        return self._streams.to_host(tensor)

    def _from_host(self, tensor: Tensor) -> Tensor:
        return self._streams.from_host(tensor)


def _check_arithmetic(device: torch.device, config: RunConfig) -> None:
    """Check that an update has the same result here as on the CPU, bit for bit (rule 6).

    Raises:
        ConfigError: the results differ.
    """
    numel = 16 * config.block_size
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.logspace(-20, 4, 16).repeat_interleave(config.block_size)
    start, change = (magnitudes * torch.randn(numel, generator=generator) for _ in range(2))
    update = encode(change, wire=config.wire, block_size=config.block_size, name="a test")
    here, there = (
        Decoder(update.to(where), numel, config.wire, config.block_size).add_to(start.to(where, copy=True)).cpu()
        for where in (torch.device("cpu"), device)
    )
    if not torch.equal(here, there):
        raise ConfigError(
            f"{int((here != there).sum())} of {numel} sums differ on {device.type} from those of the CPU: all learners "
            'of a run need the same bits; pass Trainer(accelerator="cpu")'
        )
