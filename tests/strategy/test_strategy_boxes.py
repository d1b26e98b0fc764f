"""The box of a rank's part of a DTensor agrees with torch for all layouts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.backends.model_parallel import box

NUM_DATA, NUM_TENSOR = 2, 3
SHAPE = (35, 7)


def meshes() -> Iterator[DeviceMesh]:
    """Return the mesh of each rank; the other ranks do not exist."""
    for rank in range(NUM_DATA * NUM_TENSOR):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_DATA * NUM_TENSOR)
        try:
            yield init_device_mesh("cpu", (NUM_DATA, NUM_TENSOR))
        finally:
            dist.destroy_process_group()


def laid_out(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> DTensor:
    return DTensor.from_local(torch.empty(shape), mesh, placements, shape=torch.Size(SHAPE), stride=(SHAPE[1], 1))


@pytest.mark.parametrize(
    "placements",
    [
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (_StridedShard(0, split_factor=NUM_TENSOR), Shard(0)),  # FSDP2 after tensor parallel, both by rows
    ],
    ids=["whole", "rows", "rows_columns", "columns_rows", "rows_twice"],
)
def test_box_agrees_with_torch(placements):
    covered = torch.zeros(SHAPE, dtype=torch.int64)
    for mesh in meshes():
        shape, firsts = compute_local_shape_and_global_offset(torch.Size(SHAPE), mesh, placements)
        assert box("a", laid_out(mesh, placements, tuple(shape))) == (tuple(firsts), tuple(shape))
        covered[tuple(slice(first, first + size) for first, size in zip(firsts, shape, strict=True))] += 1
    assert covered.min() == covered.max() > 0  # each element equally often


@pytest.mark.parametrize(
    ("placements", "shape"),
    [((Partial(), Replicate()), SHAPE), ((Shard(0), Replicate()), (5, 7))],
    ids=["sums", "other_rows"],
)
def test_layout_that_is_not_a_box_is_refused_by_name(placements, shape):
    for mesh in meshes():
        with pytest.raises(ConfigError, match=r"layers\.weight of shape \(35, 7\) is laid out as .*: each rank must"):
            box("layers.weight", laid_out(mesh, placements, shape))
