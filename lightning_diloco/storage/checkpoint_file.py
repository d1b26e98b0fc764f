"""The file of one checkpoint: tensors as safetensors, other values as JSON in its header (`tree.py`).

Unlike with `torch.save`, nothing is pickled (`tree.py`). A reader must know the digest of the file.

Source: our choice.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_diloco.errors import StorageError
from lightning_diloco.storage.tree import Packed, Tree, pack, unpack

FORMAT = 1
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state that a learner needs to continue, in addition to the anchors.

    Args:
        run, learner, incarnation: writer of the checkpoint.
        process: nonce of the process that wrote it.
        step: optimizer steps of the trainer so far.
        state: tensors and plain values.
        marker: last marker seen before the checkpoint was taken.
        layout: how several ranks hold the model; None: a single device holds it.
        parts: digests of the ranks' parts, in the order of ranks.
    """

    run: str
    learner: str
    incarnation: int
    process: str
    step: int
    state: Tree
    marker: str | None = None
    layout: str | None = None
    parts: tuple[str, ...] = ()


def write(path: Path, checkpoint: Checkpoint) -> str:
    """Write a file; return its digest. Raises `UnstorableError` for values that are neither plain nor tensors."""
    tensors: dict[str, Tensor] = {}
    about = {"format": FORMAT, "run": checkpoint.run, "learner": checkpoint.learner, "step": checkpoint.step}
    about |= {"incarnation": checkpoint.incarnation, "process": checkpoint.process, "marker": checkpoint.marker}
    about |= {"layout": checkpoint.layout, "parts": checkpoint.parts, "state": pack(checkpoint.state, tensors)}
    save_file(tensors, path, metadata={"diloco": json.dumps(about)})
    return _digest(path)


def read(path: Path, digest: str, *, name: str) -> Checkpoint:
    """Read a file.

    Args:
        path: a local file.
        digest: expected digest.
        name: name of the checkpoint, for errors.

    Raises:
        StorageError: the file is damaged.
    """
    if (found := _digest(path)) != digest:
        raise _damaged(name, f"has the digest {found}")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["diloco"])
            # Copies, because the optimizer continues with them, and the file may be removed.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return _checkpoint(about, tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _damaged(name, f"cannot be read ({type(error).__name__}: {error})") from error


def _checkpoint(about: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']}, this version reads {FORMAT}")
    state: Packed = about["state"]
    return Checkpoint(
        run=about["run"],
        learner=about["learner"],
        incarnation=about["incarnation"],
        process=about["process"],
        step=about["step"],
        state=unpack(state, tensors),
        marker=about["marker"],
        layout=about.get("layout"),
        parts=tuple(about.get("parts", ())),
    )


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _damaged(path: str, found: str) -> StorageError:
    return StorageError(
        f"the checkpoint {path} {found}; its digest must be the one in its name; it is not used, and may be removed"
    )
