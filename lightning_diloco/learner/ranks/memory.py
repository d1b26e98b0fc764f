"""Memory that exchanging takes on one rank, by formula. It is logged when a learner with several ranks has joined.

1. A rank holds these as long as the learner trains: anchors and spare buffers, each as long as the rank's largest part
   of a fragment; residuals, if error feedback is on and a landing discards unsent progress; and contributions whose
   fate is unknown. Rank 0 keeps all bytes of these contributions, and every other rank keeps its own part.
2. These suffice while fragments are exchanged one after another. If exchanging takes longer than the steps between two
   fragments, several are on their way at the same time. Each further one takes buffers for its snapshot and landing.
3. The largest fragment takes more memory for moments: while it is encoded, while its updates arrive, or while it is
   adopted in full. A rank does only one of these at a time.
4. The formula leaves out parameters, gradients and optimizer, sockets and threads, and the copy of the local parameters
   while the anchor is validated.

Source: devices/dense.py, devices/part.py and learner/ranks/reshard.py; a test compares it with what real ranks take.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_diloco.config import CHAIN_LENGTH, LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import wire_nbytes
from lightning_diloco.devices.part import PartPlan

SPARE_BUFFERS = 4
FURTHER_BUFFERS = 4  # a snapshot, a new anchor, and the values before and after
_FLOAT_BYTES = 4
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory that exchanging takes on one rank, in bytes.

    Args:
        anchors: anchors of all fragments.
        buffers: buffers for snapshots and landings.
        residuals: encoding errors.
        sent: encoded contributions of all fragments.
        passing: peak of the memory for moments (rule 3).
        further: peak for each further fragment that is on its way at the same time.
    """

    anchors: int
    buffers: int
    residuals: int
    sent: int
    passing: int
    further: int

    @property
    def peak(self) -> int:
        """Peak, with one fragment at a time."""
        return self.anchors + self.buffers + self.residuals + self.sent + self.passing

    def __str__(self) -> str:
        named = {"anchors": self.anchors, "buffers": self.buffers, "residuals": self.residuals, "sent": self.sent}
        held = ", ".join(f"{name} {nbytes / _MIB:.1f}" for name, nbytes in named.items() if nbytes)
        passing, further = self.passing / _MIB, self.further / _MIB
        return (
            f"exchanging takes up to {self.peak / _MIB:.1f} MiB of this rank: {held}, and {passing:.1f} while a "
            f"fragment passes; {further:.1f} MiB more for each further one that is on its way at the same time"
        )


def footprint(
    plan: FragmentPlan, config: RunConfig, learner: LearnerConfig, *, rank: int, size: int, part: PartPlan | None
) -> Footprint:
    """Return the footprint of one rank.

    Args:
        plan: fragment plan of the run.
        config: options of the run.
        learner: options of this learner.
        rank, size: index of the rank, and number of ranks of this learner.
        part: this rank's part of the plan; None: the rank holds whole parameters.
    """
    fragments, block_size = range(plan.num_fragments), config.block_size
    wholes = [plan.layout(p, block_size).padded_numel for p in fragments]
    owns = wholes if part is None else [part.layout(p, block_size).padded_numel for p in fragments]
    wired = [wire_nbytes(numel, config.wire, config.block_size) for numel in wholes]
    whole, own = max(wholes) * _FLOAT_BYTES, max(owns) * _FLOAT_BYTES
    feeds_back = learner.align != "carry" and learner.error_feedback
    return Footprint(
        anchors=len(owns) * own,
        buffers=SPARE_BUFFERS * own,
        residuals=2 * len(owns) * own if feeds_back else 0,
        sent=sum(wired) // (size if rank else 1),
        further=FURTHER_BUFFERS * own,
        passing=_passing(whole, own, max(wired), is_first=rank == 0, size=size, is_part=part is not None),
    )


def _passing(whole: int, own: int, wired: int, *, is_first: bool, size: int, is_part: bool) -> int:
    """Return the bytes for moments; `whole` and `own` are bytes of float32 values."""
    chain = CHAIN_LENGTH * wired * (3 if is_first else 1)  # rank 0: as received, as a tensor, and for other ranks
    full = whole * (2 if is_first else 1)
    if not is_part:
        return max(2 * wired, chain, full)
    share = whole // size
    dealt = own + max(own + share, 2 * share) + 2 * wired // size + (2 * wired if is_first else 0)
    return max(dealt, chain + (CHAIN_LENGTH + 1) * own, full + own)
