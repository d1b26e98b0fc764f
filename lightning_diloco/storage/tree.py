"""Convert nested plain values and tensors to JSON and named tensors, which safetensors files can hold.

1. None, booleans, numbers, strings, lists, tuples, dicts with plain keys, Counters and tensors are restored as they
   were. Subclasses are restored as these types.
2. `pack` refuses other values, and the error names their place in the tree. Nothing is pickled. `torch.save` would
   write such a value, and `torch.load` with `weights_only=True` would refuse it only when a learner needs the file.

Source: our choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor

from lightning_diloco.errors import LocalError

Tree: TypeAlias = "bool | int | float | str | Tensor | list[Tree] | tuple[Tree, ...] | dict[Tree, Tree] | None"
Packed: TypeAlias = "bool | int | float | str | list[Packed] | dict[str, Packed] | None"


class UnstorableError(LocalError, TypeError):
    """A value is neither plain nor a tensor."""


def pack(tree: object, tensors: dict[str, Tensor], where: str = "") -> Packed:
    """Convert a tree to JSON.

    Args:
        tree: nested values.
        tensors: receives the tensors, named by their place in the tree.
        where: place of `tree` itself.

    Raises:
        UnstorableError: a value is neither plain nor a tensor.
    """
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case Tensor():
            tensors[where] = tree
            return {"tensor": where}
        case list():
            return [pack(value, tensors, f"{where}[{k}]") for k, value in enumerate(tree)]
        case tuple():
            return {"tuple": pack(list(tree), tensors, where)}
        case Mapping() if all(map(_is_key, tree)):
            pairs: list[Packed] = [[key, pack(value, tensors, f"{where}.{key}")] for key, value in tree.items()]
            return {"counter" if isinstance(tree, Counter) else "dict": pairs}
    raise UnstorableError(
        f"{where or 'the value'} is a {type(tree).__name__}; only plain values, lists, tuples, dicts with plain keys "
        "and tensors can be kept; leave it out of the state, or convert it to one of these"
    )


def unpack(packed: Packed, tensors: Mapping[str, Tensor]) -> Tree:
    """Convert the result of `pack` back. Raises `KeyError` or `ValueError` for other values."""
    if isinstance(packed, list):
        return [unpack(value, tensors) for value in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[str(content)]
    if kind not in ("tuple", "dict", "counter") or not isinstance(content, list):
        raise ValueError(f"found a {kind!r} of {type(content).__name__}")
    if kind == "tuple":
        return tuple(unpack(value, tensors) for value in content)
    pairs = dict(_pair(pair, tensors) for pair in content)
    return Counter(pairs) if kind == "counter" else pairs  # type: ignore[return-value]


def _pair(pair: Packed, tensors: Mapping[str, Tensor]) -> tuple[Tree, Tree]:
    if not isinstance(pair, list):
        raise ValueError(f"found a {type(pair).__name__} where a pair is needed")
    key, value = pair
    return unpack(key, tensors), unpack(value, tensors)


def _is_key(key: object) -> bool:
    return key is None or isinstance(key, (bool, int, float, str))
