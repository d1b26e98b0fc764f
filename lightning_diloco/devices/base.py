"""The device interface of the link.

1. Methods marked *training thread* run inside a Lightning hook and never wait for the network. Only `settle` waits for
   another thread, and only for copies that this thread has already started.
2. Methods marked *link thread* run in parallel with training. They read live parameters only through `settle` and never
   change them.
3. Call `settle` before changing parameters: a snapshot holds the values of its step boundary, regardless of when they
   are copied. `adopt` and `show_anchor` call it themselves. `land` does not need it, because rule 4 keeps a landing and
   a pending snapshot of the same fragment apart. If a parameter changes too early anyway, each element is sent with
   either its old or its new value. A landing subtracts exactly what was sent (`core/align.py`), so no progress is lost
   or counted twice.
4. Per fragment, `encode` follows `snapshot`, and `land` follows `stage`. No `land` comes between a `snapshot` and the
   end of its `encode`, because the pseudo-gradient is measured against the anchor at the time of the snapshot. The
   learner state machine (protocol/learner/machine.py) guarantees this order; a device may rely on it.
5. An anchor is one padded flat float32 vector per fragment (`core.fragments.FragmentLayout`). It is the published start
   value plus the published updates, added in float32, and therefore bit-identical on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

SnapshotT = TypeVar("SnapshotT")
StagedT = TypeVar("StagedT")


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded contribution, ready to be sent.

    Args:
        payload: encoded pseudo-gradient, uint8 [wire_nbytes], on the host.
        norm: Euclidean norm of the pseudo-gradient before encoding.
        relative_error: norm of the encoding error, divided by `norm` (0 if `norm` is 0).
    """

    payload: Tensor
    norm: float
    relative_error: float


@dataclass(frozen=True, slots=True)
class Update:
    """A received update of one fragment.

    Args:
        full: float32 [P] published values that replace the anchor; None if the update is a chain.
        chain: encoded updates, uint8 [wire_nbytes] each, added to the anchor one by one in version order.
        sent: this learner's own encoded contribution, uint8 [wire_nbytes], if the update contains it; else None.
    """

    full: Tensor | None
    chain: Sequence[Tensor]
    sent: Tensor | None


class FragmentDevice(Protocol, Generic[SnapshotT, StagedT]):
    """Anchors and live parameters of one learner."""

    def adopt(self, fragment: int, values: Tensor) -> None:
        """Set anchor and parameters to `values` (float32 [P], host). Training thread, while no step is running."""

    def local_values(self, fragment: int) -> Tensor:
        """Return the live parameters as float32 [P] on the host, for seeding and checkpoints.

        Training thread, between steps.
        """

    def snapshot(self, fragment: int) -> SnapshotT:
        """Copy the parameters that `encode` needs, or schedule the copy. Training thread; never waits."""

    def settle(self) -> None:
        """Finish the copies that snapshots have scheduled, if there are any. Any thread.

        The training thread calls it before parameters change. Another thread calls it soon after a snapshot, so that
        the training thread has little left to copy.
        """

    def collect(self, snapshot: SnapshotT) -> None:
        """Copy a snapshot's results from the device to the host; does nothing if `encode` computes everything.

        Waits for a device that runs some steps behind its host. Otherwise `encode` does the same; a thread that blocks
        nothing else calls `collect` first.
        """

    def encode(self, snapshot: SnapshotT) -> Encoded:
        """Encode the pseudo-gradient (anchor - local) of a snapshot; the result is on the host. Link thread.

        Raises:
            NonFiniteError: the pseudo-gradient holds NaN or Inf; the error names the parameter.
        """

    def stage(self, fragment: int, update: Update) -> StagedT:
        """Compute the new anchor and everything else that `land` does not need live parameters for. Link thread.

        Raises:
            CorruptMessageError: the update has a wrong length or holds non-finite values.
        """

    def land(self, fragment: int, staged: StagedT) -> None:
        """Make the new anchor current and align the parameters with it. Training thread."""

    def anchor(self, fragment: int) -> Tensor:
        """Return the anchor, float32 [P] on the host. Any thread.

        The result is invalid if the fragment lands or is adopted during the call. Waits for a device that runs some
        steps behind its host.
        """

    def show_anchor(self) -> None:
        """Save the local values and put cast(anchor) into the live parameters. Training thread."""

    def show_local(self) -> None:
        """Restore the local values after `show_anchor`; does nothing without one. Training thread."""
