"""Files written and read without a copy are compatible with the safetensors library."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lightning_diloco.storage import tensor_file
from lightning_diloco.storage.files import write_file

TENSORS = {
    "master": torch.linspace(-1.0, 1.0, 35).view(5, 7),
    "chain": torch.arange(13, dtype=torch.uint8),
    "none": torch.empty(0, dtype=torch.uint8),
    "doubles": torch.tensor([0.1, 0.7], dtype=torch.float64),
    "halves": torch.linspace(-2.0, 2.0, 9).bfloat16(),
    "number": torch.tensor(5),
}


def assert_same(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_files_are_compatible_with_the_library_in_both_directions(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    write_file(ours, *tensor_file.pieces(TENSORS))
    assert_same(load_file(ours))
    assert_same(tensor_file.read(ours))
    save_file(TENSORS, theirs, metadata={"format": "pt"})
    assert_same(tensor_file.read(theirs))


def test_written_pieces_share_the_tensors_memory() -> None:
    _, first, *_ = tensor_file.pieces(TENSORS)
    assert torch.frombuffer(first, dtype=torch.uint8).data_ptr() == TENSORS["master"].data_ptr()
