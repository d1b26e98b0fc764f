"""Each field of a learner's messages has a limit. The test finds all fields by itself, so it covers new ones."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator

import msgspec
import pytest

from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.protocol import limits, messages
from lightning_diloco.protocol.codec import Value

LONG = "x" * (limits.MAX_CHARS + 1)
MANY = limits.MAX_NAMES + 1
CHECKED_ELSEWHERE = {"manifest"}  # `manifests.defect`


def example(hint: object) -> object:
    """Return the smallest value of this type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return example(args[0])
    if origin is typing.Literal:
        return args[0]
    if origin is tuple:
        return () if args[-1] is ... else tuple(map(example, args))
    if isinstance(hint, type) and issubclass(hint, Value):
        return hint(**{name: example(of) for name, of in typing.get_type_hints(hint).items()})
    return {} if origin is dict else {int: 1, float: 1.0, str: "x", bool: False}[hint]  # type: ignore[index]


def excesses(hint: object) -> Iterator[object]:
    """Return values of this type that are too large."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in args:
            yield from excesses(option)
    elif origin is tuple and args[-1] is ...:
        yield (example(args[0]),) * MANY
        for item in excesses(args[0]):
            yield (item,)
    elif origin is dict:
        yield dict.fromkeys(map(str, range(MANY)), example(args[1]))
        yield {LONG: example(args[1])}
        for item in excesses(args[1]):
            yield {"name": item}
    elif hint is str:
        yield LONG
    elif hint is int:
        yield from (-(2**63) - 1, 2**63)
    elif hint is float:
        yield from (math.nan, math.inf, -math.inf)
    elif isinstance(hint, type) and issubclass(hint, Value):
        for name, of in typing.get_type_hints(hint).items():
            for item in excesses(of) if name not in CHECKED_ELSEWHERE else ():
                yield msgspec.structs.replace(example(hint), **{name: item})  # type: ignore[type-var]


def is_accepted(message: object) -> bool:
    """Return whether the decoder accepts this message."""
    try:
        messages.decode(messages.encode(message), messages.FromLearner)  # type: ignore[arg-type]
    except CorruptMessageError:
        return False
    return True


@pytest.mark.seconds
@pytest.mark.parametrize("kind", typing.get_args(messages.FromLearner), ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_has_a_limit(kind: type) -> None:
    assert is_accepted(example(kind))
    accepted = [excess for excess in excesses(kind) if is_accepted(excess)]
    assert not accepted, f"{len(accepted)} are accepted, such as {accepted[0]!r:.200}"
