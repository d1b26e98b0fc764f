"""One checkpoint as a file: tensors as safetensors, and the plain rest as JSON in its header (`tree.py`).

Nothing is pickled: `torch.save` pickles, and finds what cannot be read again too late (`tree.py`). Who reads one knows
the digest that its bytes must have.

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
    """What a learner needs besides the anchors to go on.

    Args:
        run, learner, incarnation: whose it is.
        process: a nonce of the process that wrote it.
        step: optimizer steps of the trainer so far.
        state: tensors and plain values.
        marker: the last marker that was seen before it was taken.
        layout: how several ranks hold the model; None: one device does.
        parts: digests of what each rank holds, by rank.
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
    """Fill this file; returns its digest. Raises `UnstorableError` for what is neither plain nor a tensor."""
    tensors: dict[str, Tensor] = {}
    about = {"format": FORMAT, "run": checkpoint.run, "learner": checkpoint.learner, "step": checkpoint.step}
    about |= {"incarnation": checkpoint.incarnation, "process": checkpoint.process, "marker": checkpoint.marker}
    about |= {"layout": checkpoint.layout, "parts": checkpoint.parts, "state": pack(checkpoint.state, tensors)}
    save_file(tensors, path, metadata={"diloco": json.dumps(about)})
    return _digest(path)


def read(path: Path, digest: str, *, name: str) -> Checkpoint:
    """The inverse.

    Args:
        path: a local file.
        digest: of a whole one.
        name: what it is called where it comes from.

    Raises:
        StorageError: it is damaged.
    """
    if (found := _digest(path)) != digest:
        raise _damaged(name, f"has the digest {found}")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["diloco"])
            # Copies: an optimizer that goes on from them must not hang on a file that is removed some day.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return _checkpoint(about, tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _damaged(name, f"is not one ({type(error).__name__}: {error})") from error


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
        f"the checkpoint {path} {found}; a whole one has the digest of its name; it is passed over, and may be removed"
    )
