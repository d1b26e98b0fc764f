"""Fragments whose parameters lie in host memory: the link thread works on the same memory as training, aside of it."""

from __future__ import annotations

from lightning_diloco.devices.dense import DenseFragments


class CpuFragments(DenseFragments):
    """A `FragmentDevice` on the CPU; see `DenseFragments` for its arguments."""
