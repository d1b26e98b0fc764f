"""Strategies for received data: nearly valid messages, flawed contributions, and arbitrary JSON."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, Union

import msgspec
from hypothesis import strategies as st

from lightning_diloco.protocol import messages
from lightning_diloco.protocol.codec import Value

EDGES = [0, 1, 2, -1, 3, 7, 64, 2**31, 2**53, 2**63 - 1, -(2**63), 2**63, 10**30]
FLOATS = [0.0, 0.02, 0.01, -1.0, 1e-300, 1e300, 1.7e308]
WORDS = ["", "l0", "honest", "mallory", "../../etc", "tokens", "a" * 300, "\x00", "ü", "run", "\ud800"]
KINDS: tuple[type, ...] = typing.get_args(messages.FromLearner)

integers = st.sampled_from(EDGES) | st.integers(-5, 200)
texts = st.sampled_from(WORDS) | st.text(max_size=8)
scalars = st.none() | st.booleans() | integers | st.sampled_from(FLOATS) | texts
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
json_objects = st.dictionaries(
    st.sampled_from(["kind", "fragment", "ready", "session", ""]) | texts, json_values, max_size=5
)


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Return JSON values for this type of a message's field."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of([of_type(option) for option in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        if args[-1] is ...:
            return st.lists(of_type(args[0]), max_size=3)
        return st.tuples(*map(of_type, args)).map(list)
    if origin is dict:
        return st.dictionaries(texts, of_type(args[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, Value):
        return fields_of(hint)
    simple = {int: integers, float: st.sampled_from(FLOATS), str: texts, bool: st.booleans(), type(None): st.none()}
    return simple.get(hint, json_values)


def fields_of(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with the fields of a message or of a part of one."""
    hints = typing.get_type_hints(kind)
    return st.fixed_dictionaries({field.name: of_type(hints[field.name]) for field in msgspec.structs.fields(kind)})


def _message(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    return fields_of(kind).map(lambda fields: {"kind": kind.__name__, **fields})


@st.composite
def _mutated(draw: st.DrawFn) -> dict[str, Any]:
    """Return a message with a missing field, an additional field, or a field of another type."""
    message = draw(st.one_of([_message(kind) for kind in KINDS]))
    name = draw(st.sampled_from(sorted(message)))
    how = draw(st.sampled_from(["missing", "added", "replaced"]))
    if how == "missing":
        del message[name]
    else:
        message[name if how == "replaced" else draw(texts)] = draw(json_values)
    return message


near_valid = st.one_of([_message(kind) for kind in KINDS])
control_messages = near_valid | _mutated() | json_objects
plain_ready = st.fixed_dictionaries(
    {
        "fragment": st.integers(0, 1),
        "start": st.integers(0, 50),
        "stop": st.integers(51, 99),
        "steps": st.integers(1, 9),
    }
)


@dataclasses.dataclass(frozen=True)
class Flawed:
    """A contribution that must never be merged, because its description or its bytes are wrong.

    Args:
        ready: description; the test adds fields that depend on the state of the run (seq, base, generation).
        flaw: fields that finally replace those of the description; None removes a field.
        payload: bytes of the contribution.
        is_announced: whether the description is also sent on the control connection.
    """

    ready: dict[str, Any]
    flaw: dict[str, Any]
    payload: bytes
    is_announced: bool


FLAWS = [
    {"steps": 0}, {"stop": 0}, {"start": -1}, {"start": 99}, {"fragment": 9}, {"seq": 0}, {"steps": None}, {"x": 1},
    {"start": "0"}, {"steps": 1.5}, {"base": -1}, {"steps": 2**63}, {"stop": 10**30}, {"seq": True},
]  # fmt: skip
BAD_SCALES = [b"\xc0\x7f", b"\x80\x7f", b"\x80\xff", b"\x80\xbf"]  # bfloat16: NaN, Inf, -Inf, -1
GOOD_SCALE = b"\x80\x3f"


@st.composite
def flawed_contributions(draw: st.DrawFn, num_values: int, num_scales: int) -> Flawed:
    """Return contributions with one flaw each; valid bytes are int8 values, then bfloat16 scales."""
    ready, is_announced = draw(plain_ready), draw(st.booleans())
    if draw(st.booleans()):
        return Flawed(ready, {}, draw(_flawed_payloads(num_values, num_scales)), is_announced)
    return Flawed(ready, draw(st.sampled_from(FLAWS)), bytes(num_values + 2 * num_scales), is_announced)


@st.composite
def _flawed_payloads(draw: st.DrawFn, num_values: int, num_scales: int) -> bytes:
    size = num_values + 2 * num_scales
    if draw(st.booleans()):
        return draw(st.binary(max_size=2 * size).filter(lambda data: len(data) != size))
    scales = [GOOD_SCALE] * num_scales
    scales[draw(st.integers(0, num_scales - 1))] = draw(st.sampled_from(BAD_SCALES))
    return draw(st.binary(min_size=num_values, max_size=num_values)) + b"".join(scales)
