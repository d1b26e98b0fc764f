"""Conversion of frozen values to JSON objects and back, by msgspec with this project's errors.

1. `load` accepts exactly the declared fields with exactly the declared types and bounds (`limits.py`).
2. Messages, log records and snapshots all use `load`, so the same rules check all input from outside.
3. msgspec analyzes a class when it is first loaded. Two threads that do so at once crash the process, so `load` lets
   one thread at a time analyze.
4. `msgspec.structs.replace` returns a copy of a value with some fields changed.
"""

from __future__ import annotations

import re
import threading
import typing
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from lightning_diloco.errors import CorruptMessageError

Json = dict[str, object]
T = TypeVar("T")
_PLACE = re.compile(r"^(?:Expected )?(.*?)(?: - at (?:`key` in )?`\$(.*)`)?$", re.DOTALL)
_STEPS = re.compile(r"\.(\w+)|\[(\d+)\]")

_analyzing = threading.Lock()
_analyzed: set[type] = set()


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of all values in messages, log records and snapshots."""


class Tagged(Value, frozen=True, tag_field="kind", tag=True):
    """A value whose JSON object holds the name of its class under "kind"."""


def dump(value: Value) -> Json:
    """Return a value as a JSON object; sequences are tuples or lists."""
    return typing.cast("Json", msgspec.to_builtins(value))


def load(kind: type[T], values: object, where: str = "") -> T:
    """Build a value from a JSON object; the inverse of `dump`.

    Args:
        kind: the class to build.
        values: a parsed JSON object.
        where: name of this object in error messages.

    Raises:
        CorruptMessageError: missing or unknown fields, or a value of a wrong type or out of bounds. No value is
            converted to another type.
    """
    if kind not in _analyzed:
        with _analyzing:
            msgspec.json.Decoder(kind)
            _analyzed.add(kind)
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CorruptMessageError(_objection(kind, where or kind.__name__, values, str(error))) from None


def load_tagged(kinds: Mapping[str, type[T]], values: object, what: str) -> T:
    """Build a value of one of several tagged classes from a JSON object.

    Args:
        kinds: the classes by name.
        values: a parsed JSON object.
        what: what the object is, for error messages.

    Raises:
        CorruptMessageError: unknown kind, or see `load`.
    """
    kind = kinds.get(str(values.get("kind"))) if isinstance(values, dict) else None
    if kind is None:
        raise CorruptMessageError(
            f"found {values!r:.80} as {what}; must be one of {', '.join(kinds)}; do both sides run the same version?"
        )
    return load(kind, values)


def _objection(kind: type, where: str, values: object, text: str) -> str:
    """Return msgspec's message with the value that was found and, if msgspec leaves it out, what is allowed."""
    wanted, path = typing.cast("re.Match[str]", _PLACE.match(text)).groups(default="")
    for name, number in _STEPS.findall(path.partition("[...]")[0]):  # msgspec names no entry of a table
        values = typing.cast("Json", values)[name] if name else typing.cast("list[object]", values)[int(number)]
    if not text.startswith("Expected"):
        fields = typing.get_type_hints(kind)
        allowed = fields.get(path[1:], "as declared") if path else f"an object of {', '.join(fields)}"
        wanted = f"{str(allowed).removeprefix('typing.')} ({wanted})"
    return (
        f"{where}{path}: found {values!r:.80}; must be {wanted}; nothing of it was used; do both sides run the same "
        "version?"
    )
