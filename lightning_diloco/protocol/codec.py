"""Frozen dataclasses to JSON objects and back, strictly.

1. `load` accepts exactly the declared fields with exactly the declared types; lists become tuples, objects dataclasses.
2. No NaN or infinity passes, no bool passes for an integer, and integers fit 64 bits.
3. Used for messages, log records and snapshots alike, so one set of rules decides what may come in from outside.
4. A type is looked at once: for each there is one function that reads its values.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Literal, TypeVar, Union

from lightning_diloco.errors import CorruptMessageError

Json = dict[str, object]
T = TypeVar("T")
Reader = Callable[[object], object]
_SCALARS = frozenset({str, int, float, bool, type(None)})


class _WrongError(Exception):
    """A value that is not what its type says; `where` grows from the inside out."""

    def __init__(self, text: str, where: str = "") -> None:
        super().__init__(text)
        self.text, self.where = text, where


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
    try:
        return typing.cast("T", _read_object(kind, values))
    except _WrongError as wrong:
        found = f"{where or kind.__name__}{wrong.where}: {wrong.text}"
        raise CorruptMessageError(f"{found}; nothing of it was used") from None


@cache
def _fields(kind: type) -> tuple[dict[str, object], frozenset[str]]:
    """Type of each field of a dataclass, and the fields without a default."""
    hints, fields, missing = typing.get_type_hints(kind), dataclasses.fields(kind), dataclasses.MISSING
    required = frozenset(f.name for f in fields if f.default is missing and f.default_factory is missing)
    return {f.name: hints[f.name] for f in fields}, required


def _plain(value: object) -> object:
    if type(value) in _SCALARS:
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return dump(value) if dataclasses.is_dataclass(value) else value


@cache
def _reader(hint: Hashable) -> Reader:
    """What reads a value of this type, or raises `_WrongError`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return partial(_read_any, hint, tuple(_reader(option) for option in args))
    if origin is Literal:
        return partial(_read_literal, args)
    if origin is tuple and args[-1] is ...:
        return partial(_read_sequence, _reader(args[0]))
    if origin is tuple:
        return partial(_read_tuple, tuple(_reader(arg) for arg in args))
    if origin is dict:
        return partial(_read_dict, _reader(args[1]))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return partial(_read_object, hint)
    return partial(_read_scalar, hint)


def _wrong(value: object, hint: object) -> _WrongError:
    return _WrongError(f"found {value!r:.80}, which is not {hint}")


def _inside(name: str, read: Reader, value: object) -> object:
    try:
        return read(value)
    except _WrongError as wrong:
        raise _WrongError(wrong.text, name + wrong.where) from None


def _read_object(kind: type, value: object) -> object:
    if not isinstance(value, dict):
        raise _wrong(value, kind.__name__)
    hints, required = _fields(kind)
    if not required <= value.keys() <= hints.keys():
        raise _WrongError(f"found fields {sorted(value)}; needed are {sorted(required)}, allowed {sorted(hints)}")
    return kind(**{name: _inside(f".{name}", _reader(hints[name]), item) for name, item in value.items()})


def _read_any(hint: object, options: tuple[Reader, ...], value: object) -> object:
    for read in options:
        try:
            return read(value)
        except _WrongError:
            continue
    raise _wrong(value, hint)


def _read_literal(allowed: tuple[object, ...], value: object) -> object:
    if type(value) is str and value in allowed:
        return value
    raise _wrong(value, allowed)


def _read_sequence(read: Reader, value: object) -> object:
    if not isinstance(value, list | tuple):
        raise _wrong(value, "a sequence")
    return tuple(_inside(f"[{i}]", read, item) for i, item in enumerate(value))


def _read_tuple(readers: tuple[Reader, ...], value: object) -> object:
    if not isinstance(value, list | tuple) or len(value) != len(readers):
        raise _wrong(value, f"a sequence of {len(readers)}")
    return tuple(_inside(f"[{i}]", read, item) for i, (read, item) in enumerate(zip(readers, value, strict=True)))


def _read_dict(read: Reader, value: object) -> object:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _wrong(value, "an object")
    return {key: _inside(f"[{key!r}]", read, item) for key, item in value.items()}


def _read_scalar(hint: object, value: object) -> object:
    if hint is object:
        return value
    if type(value) is int and hint in (int, float) and -(2**63) <= value < 2**63:
        return value if hint is int else float(value)
    if type(value) is hint and type(value) is not int and not (type(value) is float and value - value != 0):
        return value
    raise _wrong(value, hint)
