from __future__ import annotations

import json
import subprocess
import sys
from typing import Literal

import pytest
from msgspec import field

from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.codec import Value
from lightning_diloco.protocol.limits import Finite, Int64


class Inner(Value, frozen=True):
    name: str


class Outer(Value, frozen=True):
    number: Int64
    share: Finite
    kind: Literal["a", "b"]
    inner: Inner | None
    pairs: tuple[tuple[int, int], ...] = ()
    by_name: dict[str, Finite] = field(default_factory=dict)


GOOD = {"number": 3, "share": 0.5, "kind": "a", "inner": {"name": "x"}, "pairs": [[1, 2]], "by_name": {"loss": 1.0}}


def test_load_inverts_dump() -> None:
    value = codec.load(Outer, GOOD)

    assert value == Outer(3, 0.5, "a", Inner("x"), ((1, 2),), {"loss": 1.0})
    assert json.loads(json.dumps(codec.dump(value))) == GOOD
    assert codec.load(Outer, codec.dump(value)) == value


def test_fields_with_a_default_may_be_missing() -> None:
    assert codec.load(Outer, {"number": 3, "share": 1, "kind": "b", "inner": None}).pairs == ()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"number": True}, "Outer.number"),
        ({"number": 3.0}, "Outer.number"),
        ({"number": 2**63}, "Outer.number"),
        ({"share": float("nan")}, "Outer.share"),
        ({"share": float("inf")}, "Outer.share"),
        ({"share": 10**400}, "Outer.share"),
        ({"share": "0.5"}, "Outer.share"),
        ({"kind": "c"}, "Outer.kind"),
        ({"kind": ["a"]}, "Outer.kind"),
        ({"inner": {"name": 1}}, "Outer.inner.name"),
        ({"inner": {"name": "x", "more": 1}}, "Outer.inner"),
        ({"pairs": [[1, 2, 3]]}, "Outer.pairs[0]"),
        ({"pairs": [[1, 2], [1, None]]}, "Outer.pairs[1][1]"),
        ({"pairs": 3}, "Outer.pairs"),
        ({"by_name": {"loss": float("nan")}}, "Outer.by_name[...]"),
        ({"by_name": {1: 1.0}}, "Outer.by_name"),
        ({"by_name": {"x": 1.0, "loss": "low"}}, "Outer.by_name[...]"),
        ({"unknown": 1}, "Outer"),
    ],
)
def test_a_wrong_value_is_refused_and_named(change: dict[str, object], where: str) -> None:
    with pytest.raises(CorruptMessageError) as caught:
        codec.load(Outer, {**GOOD, **change})

    assert str(caught.value).startswith(f"{where}: found")


def test_a_refusal_names_the_allowed_values() -> None:
    for change, allowed in (
        ({"kind": "c"}, r"must be Literal\['a', 'b'\]"),
        ({"more": 1}, "must be an object of number, sha"),
    ):
        with pytest.raises(CorruptMessageError, match=allowed):
            codec.load(Outer, {**GOOD, **change})


def test_a_missing_field_is_refused() -> None:
    with pytest.raises(CorruptMessageError, match="missing required field `share`"):
        codec.load(Outer, {"number": 3})


ANALYZED_AT_ONCE = """
import sys, threading
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.limits import Finite, Int64

def load(kind, start):
    start.wait()
    codec.load(kind, values)

sys.setswitchinterval(1e-6)
names = [f"field{k}" for k in range(40)]
values = dict.fromkeys(names, [1, 2.5, 3])
for _ in range(400):
    fields = dict.fromkeys(names, tuple[Int64, Finite, Int64])
    kind, start = type(codec.Value)("Fresh", (codec.Value,), {"__annotations__": fields}), threading.Barrier(4)
    threads = [threading.Thread(target=load, args=(kind, start)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.seconds
def test_threads_load_a_class_for_the_first_time_at_once() -> None:
    """Runs in a new process, because msgspec would crash it if `load` did not prevent that."""
    subprocess.run([sys.executable, "-c", ANALYZED_AT_ONCE], check=True)
