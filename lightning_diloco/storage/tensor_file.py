"""Write and read safetensors files without a second copy of the tensors in memory.

The library's `save` and `load` need up to two more copies of the file in memory.

Source: the format as https://github.com/huggingface/safetensors describes it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lightning_diloco.storage.files import Buffer

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int64: "I64",
}
_PIECE_BYTES = 1 << 20
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[Buffer]:
    """Yield the content of a file in pieces.

    Args:
        tensors: tensors by name; contiguous, on the host, of one of the dtypes above.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors.values():
        yield _bytes(tensor)


def read(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a verified file into new memory."""
    with path.open("rb") as file:
        header = json.loads(file.read(*struct.unpack("<Q", file.read(8))))
        header.pop("__metadata__", None)
        base, found = file.tell(), {}
        for name, about in header.items():
            found[name] = torch.empty(about["shape"], dtype=_DTYPES[about["dtype"]])
            file.seek(base + about["data_offsets"][0])
            file.readinto(_bytes(found[name]))
    return found


def checksum(path: Path) -> str:
    """Return the BLAKE2b checksum of a file, in hex."""
    found = hashlib.blake2b()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            found.update(piece)
    return found.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
