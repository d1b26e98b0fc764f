"""Frozen values to JSON objects and back: msgspec, with this project's errors.

1. `load` accepts exactly the declared fields with exactly the declared types and bounds (`limits.py`).
2. Used for messages, log records and snapshots alike, so one set of rules decides what may come in from outside.
3. Values that differ in one field are made by `msgspec.structs.replace`.
"""

from __future__ import annotations

import re
import typing
from typing import TypeVar

import msgspec

from lightning_diloco.errors import CorruptMessageError

Json = dict[str, object]
T = TypeVar("T")
_PLACE = re.compile(r"^(?:Expected )?(.*?)(?: - at (?:`key` in )?`\$(.*)`)?$", re.DOTALL)
_STEPS = re.compile(r"\.(\w+)|\[(\d+)\]")


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What messages, log records and snapshots consist of."""


class Tagged(Value, frozen=True, tag_field="kind", tag=True):
    """A value that says its class's name under "kind"."""


def dump(value: Value) -> Json:
    """As a JSON object; sequences are tuples or lists."""
    return typing.cast("Json", msgspec.to_builtins(value))


def load(kind: type[T], values: object, where: str = "") -> T:
    """The inverse of `dump`.

    Args:
        kind: the class to build.
        values: a parsed JSON object.
        where: how messages call this object.

    Raises:
        CorruptMessageError: missing or unknown fields, or a value of a wrong type or out of bounds; nothing is coerced.
    """
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CorruptMessageError(_objection(kind, where or kind.__name__, values, str(error))) from None


def _objection(kind: type, where: str, values: object, text: str) -> str:
    """What msgspec says, with the value it speaks of and with what it leaves out of what is allowed."""
    wanted, path = typing.cast("re.Match[str]", _PLACE.match(text)).groups(default="")
    for name, number in _STEPS.findall(path.partition("[...]")[0]):  # msgspec does not say which entry of a table
        values = typing.cast("Json", values)[name] if name else typing.cast("list[object]", values)[int(number)]
    if not text.startswith("Expected"):
        fields = typing.get_type_hints(kind)
        allowed = fields.get(path[1:], "as declared") if path else f"an object of {', '.join(fields)}"
        wanted = f"{str(allowed).removeprefix('typing.')} ({wanted})"
    return (
        f"{where}{path}: found {values!r:.80}; must be {wanted}; nothing of it was used; do both sides run the same "
        "version?"
    )
