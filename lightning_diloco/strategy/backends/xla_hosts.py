"""A learner with the XLA devices of several hosts, as one program: a slice of TPUs, one process on each host.

1. Each host is a rank (ranks.py). The ranks communicate by torch.distributed on their CPUs. Values computed on the
   devices are already reduced and equal on all hosts. The hosts agree on decisions that a process makes.
2. Every host must run the same graphs in the same order. Code of the user's module that runs on one rank only must not
   compute on the devices.
3. A batch is the concatenation of all hosts' batches, and each host loads its own. Hooks that change batches run on the
   CPU.
4. Checkpoints hold the anchor. All hosts assemble it together, and the first host writes the checkpoint. All hosts must
   be able to read it. A checkpoint may need a graph of its own. Checkpoints hold no local parameters, so a learner that
   begins a run from one begins with the anchor.

This has not run on several hosts yet, because PJRT's CPU device supports one process only. The tests use two processes
that both compute the whole mesh and read only their own devices. They show which process launches which graph, in which
order, and which process holds which values. Not tested are collectives between hosts, how TPU hosts find each other,
and torchmetrics, which may need `sync_on_compute=False`.

Source: our choice; torch_xla's rules for SPMD on several hosts.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceXLAStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.strategy.backends.ranks import RanksHooks
from lightning_diloco.strategy.backends.xla import SpmdXLADiLoCo
from lightning_diloco.strategy.backends.xla_accelerator import check_environment
from lightning_diloco.strategy.trainer.paths import OwnPathsFirst

if TYPE_CHECKING:
    from lightning_diloco.learner.link import Link
    from lightning_diloco.learner.ranks.hosts_device import HostsDevice

T = TypeVar("T")


class Hosts(SingleDeviceXLAStrategy, ParallelStrategy):
    """The collectives of several hosts. A ParallelStrategy, because Lightning splits data for those only."""

    global_rank, local_rank, world_size = 0, 0, 1  # no properties: `_bind` sets them from the mesh
    parallel_devices: Any = None

    def setup_environment(self) -> None:
        """Initialize torch.distributed over all hosts."""
        from lightning_diloco.devices.xla import ops as xla

        xla.meet_hosts()
        super().setup_environment()

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first host."""
        return bool(self.global_rank == 0)

    @property
    def is_distributed(self) -> bool:
        """Whether there are several hosts; always True."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The part of the samples that this host loads."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all hosts."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return host `src`'s object on all hosts: plain values or a path."""
        if not dist.is_initialized():
            return obj
        said = torch.frombuffer(bytearray(json.dumps(obj, default=os.fspath).encode()), dtype=torch.uint8)
        dist.broadcast(size := torch.tensor(said.numel()), src)
        said = said if self.global_rank == src else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(said, src)
        return cast(T, json.loads(said.numpy().tobytes()))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all hosts have decided so; with `all=False`, whether any host has."""
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)


class SpmdXLAHostsDiLoCo(RanksHooks, SpmdXLADiLoCo, Hosts):
    """A learner with all XLA devices of several hosts; each host exchanges the values on its own devices."""

    def _bind(self) -> None:
        decided = {name: getattr(self, name) for name in ("cluster_environment", "parallel_devices")}
        super()._bind()
        vars(self).update(decided)
        rank_zero_only.rank = self.global_rank

    def _own_launcher(self) -> _Launcher:
        """Return a launcher that starts no process; the user starts one on each host."""
        return OwnPathsFirst(self._separate_paths, self._sigterm_came)

    @property
    def _is_started_by_others(self) -> bool:
        return True

    def _make_link(self) -> Link:
        self._learner = replace(self._learner, checkpoint_every=0)  # only Lightning's checkpoints (rule 4)
        return super()._make_link()

    def _kind_of_device(self) -> type[HostsDevice]:
        from lightning_diloco.learner.ranks.hosts_device import HostsDevice

        return HostsDevice

    def _part_boxes(self) -> dict[str, Any]:
        from lightning_diloco.devices.xla import ops as xla

        return {"rows": xla.own_rows()}

    def _footprint(self) -> None:
        """See `RanksHooks._footprint`. `_make_device` logs the memory."""

    def _make_device(self, plan: FragmentPlan, config: RunConfig) -> FragmentDevice[Any, Any]:
        from lightning_diloco.devices.xla.hosts import XlaHostFragments

        device = XlaHostFragments(plan, self._present.params, config, self._learner)
        rank_zero_info(device.memory())
        return device

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Upload this host's batch as its part of the batch of all hosts."""
        from lightning_diloco.devices.xla import ops as xla

        batch = super(SpmdXLADiLoCo, self).batch_to_device(batch, torch.device("cpu"), dataloader_idx)
        return tree_map_only(Tensor, xla.upload_samples, batch)

    # --- anchors for validation and checkpoints ------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with the anchor in place of the local parameters, on all hosts."""
        if (fit := self._joined) is None or fit.validation.shows_anchor:
            return self._fetched(SingleDeviceXLAStrategy.lightning_module_state_dict(self))
        fit.device.show_anchor()
        try:
            return self._fetched(SingleDeviceXLAStrategy.lightning_module_state_dict(self))
        finally:
            fit.device.show_local()

    def _local_parameters(self) -> dict[str, Tensor]:
        return {}

    def _fetch(self, tensor: Tensor) -> Tensor:
        from lightning_diloco.devices.xla import ops as xla

        found = super()._fetch(tensor)
        if xla.sharded_dim(tensor) is not None:
            dist.all_reduce(found.view(-1).view(torch.uint8))  # each byte is zero on all hosts but one
        return found


def spmd_class() -> type[SpmdXLADiLoCo]:
    """Return the final class for all XLA devices as one program, of one host or of several."""
    check_environment(needs_platform=False)
    from lightning_diloco.devices.xla import ops as xla

    xla.use_mesh()
    return SpmdXLAHostsDiLoCo if xla.host()[1] > 1 else SpmdXLADiLoCo
