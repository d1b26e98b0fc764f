"""Frozen dataclasses to JSON objects and back, strictly.

1. `load` accepts exactly the declared fields with exactly the declared types; lists become tuples, objects dataclasses.
2. No NaN or infinity passes, no bool passes for an integer, and integers fit 64 bits.
3. Used for messages, log records and snapshots alike, so one set of rules decides what may come in from outside.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Literal, TypeVar, Union

from lightning_diloco.errors import CorruptMessageError

Json = dict[str, object]
T = TypeVar("T")


def dump(value: object) -> Json:
    """A dataclass instance as a JSON object."""
    assert dataclasses.is_dataclass(value)
    assert not isinstance(value, type)
    return {name: _plain(getattr(value, name)) for name in _fields(type(value))[0]}


def load(kind: type[T], values: Json, where: str = "") -> T:
    """The inverse of `dump`.

    Args:
        kind: the dataclass to build.
        values: a parsed JSON object.
        where: how messages call this object.

    Raises:
        CorruptMessageError: missing or unknown fields, or a value of a wrong type; nothing is coerced.
    """
    where = where or kind.__name__
    hints, required = _fields(kind)
    if not required <= set(values) <= set(hints):
        raise CorruptMessageError(
            f"{where}: found fields {sorted(values)}; needed are {sorted(required)}, allowed {sorted(hints)}"
        )
    return kind(**{name: _value(value, hints[name], f"{where}.{name}") for name, value in values.items()})


_known: dict[type, tuple[dict[str, object], frozenset[str]]] = {}


def _fields(kind: type) -> tuple[dict[str, object], frozenset[str]]:
    """Type of each field of a dataclass, and the fields without a default."""
    if kind not in _known:
        hints, fields, missing = typing.get_type_hints(kind), dataclasses.fields(kind), dataclasses.MISSING
        required = frozenset(f.name for f in fields if f.default is missing and f.default_factory is missing)
        _known[kind] = ({f.name: hints[f.name] for f in fields}, required)
    return _known[kind]


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dump(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _value(value: object, hint: object, where: str) -> object:
    """`value` as `hint` wants it, or CorruptMessageError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        for option in args:
            try:
                return _value(value, option, where)
            except CorruptMessageError:
                continue
    elif origin is Literal:
        if value in args:
            return value
    elif origin in (tuple, list):
        if isinstance(value, list | tuple) and (args[-1] is ... or origin is list or len(args) == len(value)):
            kinds = (args[0],) * len(value) if origin is list or args[-1] is ... else args
            return origin(_value(v, k, f"{where}[{i}]") for i, (v, k) in enumerate(zip(value, kinds, strict=True)))
    elif origin is dict:
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: _value(item, args[1], f"{where}[{key!r}]") for key, item in value.items()}
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if isinstance(value, dict):
            return load(hint, value, where)
    elif type(value) is int and hint in (int, float):
        if -(2**63) <= value < 2**63:
            return value if hint is int else float(value)
    elif (hint is object or type(value) is hint) and not (isinstance(value, float) and value - value != 0):
        return value
    raise CorruptMessageError(f"{where}: found {value!r:.80}, which is not {hint}; nothing of it was used")
