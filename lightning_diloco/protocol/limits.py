"""Types with the bounds of what a message may hold; msgspec checks them when a message is read.

1. Counters are not negative and below 2^53, generations below 2^31: what is derived from them can always be stored, and
   told to everybody.
2. Durations and rates are not negative, and no number is NaN or infinite; no inner step takes longer than MAX_STEP_S.
3. A fragment has at most two ranges of a learner's own: what is outstanding, and what is fresh.
4. Every text, sequence and table has a limit: a learner that says more than MAX_CHARS of itself, or more than
   MAX_METRICS numbers, wants memory, not to be read; a status of hundreds of learners must stay one. What the syncer
   explains has none, nor have manifests, which are checked where they are used (`protocol/syncer/manifests.py`).
5. A learner has at most MAX_LEASES leases, and data at most MAX_SOURCES sources.

A peer that says otherwise is broken. A learner that lies within these bounds is outside of what this package protects
against. Source: our choice.
"""

from __future__ import annotations

import sys
from typing import Annotated, TypeVar

from msgspec import Meta

MAX_COUNT = 2**53
MAX_GENERATION = 2**31
MAX_STEP_S = 3600.0
MAX_CHARS = 1000
MAX_ENTRIES = 200
MAX_METRICS, MAX_METRIC_CHARS = 64, 100
MAX_PENDING = 2
MAX_ITEMS = 1 << 16
MAX_NAMES = 1 << 17
MAX_LEASES = 4096
MAX_SOURCES = 1 << 20

T = TypeVar("T")

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]
Generation = Annotated[int, Meta(ge=0, lt=MAX_GENERATION)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Rate = Annotated[float, Meta(ge=0.0, le=sys.float_info.max)]
StepTime = Annotated[float, Meta(ge=0.0, le=MAX_STEP_S)]

Text = Annotated[str, Meta(max_length=MAX_CHARS)]
LearnerId = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]  # `config.is_learner_id`
Scalar = Text | Int64 | Finite | bool | None

Items = Annotated[tuple[T, ...], Meta(max_length=MAX_ITEMS)]
OfLeases = Annotated[tuple[T, ...], Meta(max_length=MAX_LEASES)]
Range = tuple[Count, Count]
Pending = Annotated[tuple[Range, ...], Meta(max_length=MAX_PENDING)]

Options = Annotated[dict[Text, Scalar], Meta(max_length=MAX_ENTRIES)]
Named = Annotated[dict[Text, Text], Meta(max_length=MAX_NAMES)]
_Metric = Annotated[str, Meta(max_length=MAX_METRIC_CHARS)]
Metrics = Annotated[dict[_Metric, Finite], Meta(max_length=MAX_METRICS)]
Causes = Annotated[dict[_Metric, Count], Meta(max_length=MAX_METRICS)]
