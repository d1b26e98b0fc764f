"""Fragments of a learner whose parameters are on one CUDA device.

1. The training thread only enqueues work. Its copies and landings run on its current stream, in order with training.
2. The link thread uses its own stream and synchronizes the host with it before it passes a result on. Its results can
   therefore be used on any stream without further synchronization.
3. An event marks the last time the training stream used a buffer. The link thread's stream waits for this event before
   it starts and whenever it takes a recycled buffer. The training thread never waits.
4. Host transfers use pinned memory, without which copies do not overlap with computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.dense import DenseFragments
from lightning_diloco.errors import ConfigError


class CudaFragments(DenseFragments):
    """A `FragmentDevice` on one CUDA device; see `DenseFragments` for the arguments."""

    def __init__(
        self, plan: FragmentPlan, params: Mapping[str, Tensor], config: RunConfig, learner: LearnerConfig
    ) -> None:
        if learner.anchor_device == "host":
            raise ConfigError(
                "anchor_device='host' on CUDA: must be 'device' there, only XLA learners keep anchors in host memory; "
                "remove the option and allow four bytes of GPU memory per parameter"
            )
        self._progress: torch.cuda.Event | None = None
        super().__init__(plan, params, config, learner)
        self._stream = torch.cuda.Stream(self._device)
        self._mark()

    def _mark(self) -> None:
        event = torch.cuda.Event()  # a new one each time: the link thread may still hold the previous one
        event.record(torch.cuda.current_stream(self._device))
        self._progress = event

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._wait_for_training()
            yield
            self._stream.synchronize()

    def _take(self) -> Tensor:
        buffer = super()._take()
        self._wait_for_training()
        return buffer

    def _wait_for_training(self) -> None:
        """Make the current stream wait, not the host; this has no effect on the training stream itself."""
        if self._progress is not None:
            torch.cuda.current_stream(self._device).wait_event(self._progress)

    def _to_host(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def _from_host(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)
