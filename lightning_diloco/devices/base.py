"""What the link needs from a device.

1. Methods marked *training thread* run inside a hook and never wait for the network. One waits for another thread, and
   only for what that thread has begun: `settle`.
2. Methods marked *link thread* run beside training. They read live parameters only by `settle`, and never change them.
3. Parameters may change only after `settle`: a snapshot has the values of its boundary, whoever copies them, and when.
   `adopt` and `show_anchor` settle; `land` changes only parameters of its own fragment, which rule 4 keeps apart.
   Values that somebody changes all the same are sent as they were or as they became, each of them; what is sent is
   what is taken off at the landing (`core/align.py`), so nothing is lost or counted twice.
4. For one fragment: `snapshot`, then `encode`; `stage`, then `land`. A fragment is not landed between its `snapshot`
   and the end of its `encode`: the pseudo-gradient is measured against the anchor of the snapshot's moment. The
   learner machine (protocol/learner.py) keeps this order; a device may rely on it.
5. Anchors are float32, one padded flat vector per fragment (`core.fragments.FragmentLayout`), and bit-identical on
   every device: the published start value plus the published updates, added in float32.
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
    """What goes on the wire for one contribution.

    Args:
        payload: uint8 [wire_nbytes], on the host; encoded pseudo-gradient.
        norm: Euclidean norm of the pseudo-gradient before encoding.
        relative_error: norm of what the encoding lost, divided by `norm` (0 if `norm` is 0).
    """

    payload: Tensor
    norm: float
    relative_error: float


@dataclass(frozen=True, slots=True)
class Update:
    """Published values of one fragment, as they arrived.

    Args:
        full: float32 [P] published values that replace the anchor, or None if this is a chain.
        chain: encoded updates, uint8 [wire_nbytes] each, in version order, to be added to the anchor one by one.
        sent: my own encoded contribution, uint8 [wire_nbytes], if the update contains it, else None.
    """

    full: Tensor | None
    chain: Sequence[Tensor]
    sent: Tensor | None


class FragmentDevice(Protocol, Generic[SnapshotT, StagedT]):
    """Anchors and live parameters of one learner."""

    def adopt(self, fragment: int, values: Tensor) -> None:
        """Anchor and parameters become `values` (float32 [P], host). Training thread, while nothing trains."""

    def local_values(self, fragment: int) -> Tensor:
        """The live parameters as float32 [P] on the host, for seeds and checkpoints. Training thread, between steps."""

    def snapshot(self, fragment: int) -> SnapshotT:
        """Keep what `encode` needs of the live parameters, or promise to. Training thread; never waits."""

    def settle(self) -> None:
        """Keep now what snapshots have promised to keep; nothing where none did. Any thread.

        The training thread calls it before parameters change, any other one soon after a snapshot, so that the training
        thread has little left to do.
        """

    def collect(self, snapshot: SnapshotT) -> None:
        """Bring to the host what the device computes of a snapshot; nothing where `encode` computes all of it.

        Waits for a device that is some steps behind its host. Called before `encode`, which else does the same, by a
        thread for which nothing else waits.
        """

    def encode(self, snapshot: SnapshotT) -> Encoded:
        """Pseudo-gradient (anchor - local) of a snapshot, encoded, on the host. Link thread.

        Raises:
            NonFiniteError: NaN or Inf in it; names the parameter.
        """

    def stage(self, fragment: int, update: Update) -> StagedT:
        """Compute the new anchor and whatever makes `land` cheap. Link thread.

        Raises:
            CorruptMessageError: the update's bytes have a wrong length or non-finite values.
        """

    def land(self, fragment: int, staged: StagedT) -> None:
        """The new anchor becomes current and the parameters are aligned with it. Training thread."""

    def anchor(self, fragment: int) -> Tensor:
        """The anchor, float32 [P] on the host; of no use if that fragment lands or is adopted meanwhile. Any thread.

        Waits for a device that is some steps behind its host.
        """

    def digest(self, fragment: int) -> str:
        """`core.digest.digest` of the anchor, equal on all devices. Same threads as `anchor`."""

    def show_anchor(self) -> None:
        """Put cast(anchor) into the live parameters, keeping the local values aside. Training thread."""

    def show_local(self) -> None:
        """Put the local values back after `show_anchor`; without one, nothing. Training thread."""
