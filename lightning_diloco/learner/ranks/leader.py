"""Rank 0's part in a learner of several ranks: it alone follows the protocol, and has the others start and end.

Each rank uploads its own part of a contribution (`partial_uploads.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.errors import RunOverError
from lightning_diloco.learner.join import MakeDevice
from lightning_diloco.learner.ranks.group import Ranks
from lightning_diloco.learner.ranks.partial_uploads import PartedConnection
from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice
from lightning_diloco.transport.portions import LargeConnection


class Leader:
    """What `Link` has at rank 0.

    Args:
        ranks: of this learner.
        in_front: makes what stands for all ranks' devices, of the own one.

    Attributes:
        device: stands for all ranks' devices, once rank 0 knows the run.
        is_over: whether the other ranks need nothing any more.
    """

    device: ReplicatedDevice

    def __init__(self, ranks: Ranks, in_front: Callable[..., ReplicatedDevice]) -> None:
        self._ranks, self._in_front = ranks, in_front
        self.is_over = False

    def parted(self, connection: LargeConnection) -> PartedConnection:
        """The connection, for contributions that all ranks upload."""
        self._parted = PartedConnection(connection, self._ranks.uploads)
        return self._parted

    def telling(self, make_device: MakeDevice) -> MakeDevice:
        """Make the device, and have the others make theirs, of the same plan."""

        def make(plan: FragmentPlan, config: RunConfig) -> ReplicatedDevice:
            self._ranks.tell(
                {
                    "do": "plan",
                    "config": config.to_dict(),
                    "shapes": {name: list(shape) for name, shape in plan.shapes.items()},
                    "mean_names": sorted(plan.mean_names),
                }
            )
            self.device = self._in_front(make_device(plan, config), plan=plan, config=config)
            self._parted.prepare(plan, config, self.device.dealt)
            return self.device

        return make

    @contextmanager
    def telling_failure(self) -> Iterator[None]:
        """The other ranks fail with this one."""
        try:
            yield
        except BaseException as error:
            self._ranks.tell({"do": "fail", "why": str(error), "is_over": isinstance(error, RunOverError)})
            self.is_over = True
            raise

    def go(self, join_file: Path | None, known: Mapping[str, Any]) -> None:
        """Training begins.

        Args:
            join_file: where other ranks may find how the run is joined.
            known: what they have to know of it.
        """
        self.device.deals = self._all_reach_the_syncer(join_file)
        self._ranks.tell({"do": "go", "known": dict(known), "deals": self.device.deals})

    def _all_reach_the_syncer(self, join_file: Path | None) -> bool:
        own = None if join_file is None else str(join_file.parent)
        found = self._ranks.collect({"do": "reach", "run_dir": own}, [1] * (self._ranks.size - 1))
        return self._parted.is_possible([bool(reaches) for reaches in found])

    def end_failed(self) -> None:
        """Wait until the others know that this one has failed."""
        self._ranks.end()

    def end(self) -> None:
        """Let go of the others."""
        self._ranks.tell({"do": "end"})
        self._parted.end()
        self.is_over = True
