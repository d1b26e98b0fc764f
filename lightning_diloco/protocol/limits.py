"""Types with the bounds of message fields; msgspec checks them when a message is decoded.

1. Counters are from 0 to 2^53 - 1, and generations from 0 to 2^31 - 1. Numbers derived from them can always be stored
   and sent.
2. Durations and rates are not negative, and no number is NaN or infinite. No inner step takes longer than MAX_STEP_S.
3. Per fragment, a learner has at most MAX_PENDING pending ranges: the outstanding one and the fresh one.
4. Every text, sequence and table has a maximum size, for example MAX_CHARS characters or MAX_METRICS metrics. These
   limits bound the memory of the syncer and the size of a status with hundreds of learners. Texts that the syncer sends
   as explanations have no limit. Manifests are checked in `protocol/syncer/manifests.py`.
5. A learner has at most MAX_LEASES leases, and the data of a run has at most MAX_SOURCES sources.

A message outside of these bounds comes from a broken peer. This package does not protect against learners that send
false values within these bounds.

Source: our choice.
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
