"""A learner with the XLA devices of several hosts, as one program: a slice of TPUs, one process on each host.

1. Hosts are ranks (ranks.py), which know each other by torch.distributed on their CPUs. What is computed on the devices
   is the same everywhere, reduced already; what a process decides is agreed upon.
2. Every host must run the same graphs in the same order. What a user's module does on one rank only must not compute
   on the devices there.
3. A batch is all hosts' batches, one after another; each host loads its own. Hooks that change batches do so on a CPU.
4. Checkpoints hold the anchor, put together from all hosts and written by the first; all of them must be able to read
   it; each may cost a graph. Local parameters are not saved: whoever resumes alone goes on from the anchor.

Not run on several hosts yet: PJRT's CPU device knows one process only. Tested with two processes that both compute the
whole mesh and look at their own devices only, which shows who launches what, in which order, and who holds what; not
tested are collectives between hosts, how TPU hosts find each other, and torchmetrics, which may have to be told
`sync_on_compute=False`.

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
    """What processes of several hosts agree upon. Lightning splits data for a ParallelStrategy only."""

    global_rank, local_rank, world_size = 0, 0, 1  # no properties: told by the mesh
    parallel_devices: Any = None

    def setup_environment(self) -> None:
        """Let the hosts meet."""
        from lightning_diloco.devices.xla import ops as xla

        xla.meet_hosts()
        super().setup_environment()

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first host."""
        return bool(self.global_rank == 0)

    @property
    def is_distributed(self) -> bool:
        """Whether there are other hosts."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which part of the samples this host loads."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all hosts."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """What one host says: plain values, or a path."""
        if not dist.is_initialized():
            return obj
        said = torch.frombuffer(bytearray(json.dumps(obj, default=os.fspath).encode()), dtype=torch.uint8)
        dist.broadcast(size := torch.tensor(said.numel()), src)
        said = said if self.global_rank == src else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(said, src)
        return cast(T, json.loads(said.numpy().tobytes()))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """What hosts decide together."""
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)


class SpmdXLAHostsDiLoCo(RanksHooks, SpmdXLADiLoCo, Hosts):
    """A learner with all XLA devices of several hosts; each holds, and exchanges, what lies on its devices."""

    _anchor_is_shown = False

    def _bind(self) -> None:
        decided = {name: getattr(self, name) for name in ("cluster_environment", "parallel_devices")}
        super()._bind()
        vars(self).update(decided)
        rank_zero_only.rank = self.global_rank

    def _own_launcher(self) -> _Launcher:
        """Nothing is started here: people start one process on each host."""
        return OwnPathsFirst(self._separate_paths, self._sigterm_came)

    @property
    def _is_started_by_others(self) -> bool:
        return True

    def _make_link(self) -> Link:
        self._learner = replace(self._learner, checkpoint_every=0)  # of its own; Lightning's checkpoints are rule 4
        return super()._make_link()

    def _kind_of_device(self) -> type[HostsDevice]:
        from lightning_diloco.learner.ranks.hosts_device import HostsDevice

        return HostsDevice

    def _part_boxes(self) -> dict[str, Any]:
        from lightning_diloco.devices.xla import ops as xla

        return {"rows": xla.own_rows()}

    def _footprint(self) -> None:
        """See `RanksHooks._footprint`."""

    def _make_device(self, plan: FragmentPlan, config: RunConfig) -> FragmentDevice[Any, Any]:
        from lightning_diloco.devices.xla.hosts import XlaHostFragments

        device = XlaHostFragments(plan, self._present.params, config, self._learner)
        rank_zero_info(device.memory())
        return device

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """The batches of all hosts become one."""
        from lightning_diloco.devices.xla import ops as xla

        batch = super(SpmdXLADiLoCo, self).batch_to_device(batch, torch.device("cpu"), dataloader_idx)
        return tree_map_only(Tensor, xla.upload_samples, batch)

    # --- anchors for validation and checkpoints ------------------------------------------------------------------

    def _set_evaluating(self, evaluating: bool) -> None:
        super()._set_evaluating(evaluating)
        self._anchor_is_shown = evaluating and self.evaluates_anchor

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with the anchor in place of the local parameters, on all hosts."""
        if (fit := self._joined) is None or self._anchor_is_shown:
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
            dist.all_reduce(found.view(-1).view(torch.uint8))  # each byte is zero on all hosts but its own
        return found


def spmd_class() -> type[SpmdXLADiLoCo]:
    """The final class for all XLA devices as one program: of one host, or of several."""
    check_environment(needs_platform=False)
    from lightning_diloco.devices.xla import ops as xla

    xla.use_mesh()
    return SpmdXLAHostsDiLoCo if xla.host()[1] > 1 else SpmdXLADiLoCo
