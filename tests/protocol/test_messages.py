from __future__ import annotations

import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_diloco.errors import CorruptLogError, CorruptMessageError
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.data_ranges import Catalogue, Span
from lightning_diloco.protocol.syncer import records

SECONDS = st.floats(0.0, 3600.0)
INT64 = st.integers(-(2**63), 2**63 - 1)
COUNTS = st.integers(0, 2**31 - 1)
NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,9}", fullmatch=True)
RANGES = st.tuples(st.integers(0, 9), st.integers(9, 99))
# The users of `Json` fields check their content.
JSON = st.dictionaries(st.text(), st.one_of(st.none(), st.booleans(), INT64, st.text()), max_size=3)
PROGRESS = st.builds(
    messages.Progress,
    tokens=st.integers(99, 2**53 - 1),
    pending=st.lists(st.lists(RANGES, max_size=2).map(tuple), max_size=3).map(tuple),
)
CONTRIBUTOR = st.builds(messages.Contributor, learner=NAMES)
SPAN = st.builds(Span, samples=st.integers(1, 9), start=st.integers(0, 9), stop=st.integers(9, 99))
CATALOGUE = st.builds(
    Catalogue, digest=NAMES, num_sources=st.integers(1, 99), num_ranges=st.none() | st.integers(1, 99)
)
for kind, strategy in (
    (int, COUNTS), (float, SECONDS), (messages.Progress, PROGRESS), (messages.Contributor, CONTRIBUTOR), (Span, SPAN),
    (Catalogue, CATALOGUE),
):  # fmt: skip
    st.register_type_strategy(kind, strategy)


def instances(union: object) -> st.SearchStrategy[object]:
    """Return a strategy for instances of all members of a union of dataclasses."""

    def of(kind: type) -> st.SearchStrategy[object]:
        hints = typing.get_type_hints(kind)
        names = {"learner": NAMES} if "learner" in hints else {}
        return st.builds(kind, **names, **{name: JSON for name, hint in hints.items() if hint == messages.Json})

    return st.one_of([of(kind) for kind in typing.get_args(union)])


@pytest.mark.seconds
@given(instances(messages.FromLearner))
def test_every_message_of_a_learner_survives_the_wire(message: messages.FromLearner) -> None:
    assert messages.decode(json.loads(json.dumps(messages.encode(message))), messages.FromLearner) == message


@pytest.mark.seconds
@given(instances(messages.FromSyncer))
def test_every_message_of_the_syncer_survives_the_wire(message: messages.FromSyncer) -> None:
    assert messages.decode(json.loads(json.dumps(messages.encode(message))), messages.FromSyncer) == message


@given(instances(records.LogRecord))
def test_every_log_record_survives_the_disk(record: records.LogRecord) -> None:
    text = json.dumps(records.encode(record))
    read = records.decode(json.loads(text))
    assert read == record
    assert json.dumps(records.encode(read)) == text


def test_a_message_of_the_other_side_is_refused() -> None:
    values = messages.encode(messages.LeaveNoted(True))

    with pytest.raises(CorruptMessageError, match="LeaveNoted"):
        messages.decode(values, messages.FromLearner)


@pytest.mark.parametrize("values", [None, [], "Hello", {}, {"kind": "Nothing"}, {"kind": 3}])
def test_a_value_that_is_not_a_message_is_refused(values: object) -> None:
    with pytest.raises(CorruptMessageError):
        messages.decode(values, messages.FromLearner)


def test_a_record_of_another_version_is_refused_with_advice() -> None:
    with pytest.raises(CorruptLogError, match="restart with the version"):
        records.decode({"kind": "Elected"})
