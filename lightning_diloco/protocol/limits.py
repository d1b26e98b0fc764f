"""Numbers and names that a message may hold, beyond their types.

1. Counters are not negative and below 2^53, generations below 2^31: what is derived from them can always be stored, and
   told to everybody.
2. Durations and rates are not negative; no inner step takes longer than MAX_STEP_S.
3. A learner's own ranges lie within what it says it has seen; a fragment has at most two of them: what is outstanding,
   and what is fresh.
4. Every text, sequence and table has a limit, whatever its name: who says more than MAX_CHARS of itself, or more than
   MAX_METRICS numbers, wants memory, not to be read; a status of hundreds of learners must stay one. `NO_LIMIT` names
   what has none: what the syncer explains, and manifests, which are checked where they are used
   (`protocol/syncer/manifests.py`).
5. Tokens of a lease come from samples; a learner has at most MAX_LEASES of them, and data at most MAX_SOURCES sources.

A peer that says otherwise is broken. A learner that lies within these bounds is outside of what this package protects
against. Source: our choice.
"""

from __future__ import annotations

import dataclasses

from lightning_diloco.config import is_learner_id
from lightning_diloco.protocol.data_ranges import Catalogue, Span

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
NO_LIMIT = ("text", "manifest", "data_seed")
_SEQUENCES = {"begun": MAX_LEASES, "unread": MAX_LEASES, "spans": MAX_LEASES, "repeats": MAX_LEASES}
_SEQUENCES |= {"leases": MAX_LEASES, "gone": 2 * MAX_LEASES, "mean_names": MAX_NAMES}
_TABLES = {"frozen": MAX_NAMES, "shapes": MAX_NAMES, "metrics": MAX_METRICS, "discarded": MAX_METRICS}
_NAMES = {"metrics": MAX_METRIC_CHARS, "discarded": MAX_METRIC_CHARS}


def objection(message: object) -> str | None:
    """What no working peer would say, if anything is; nested values are looked at, too."""
    for field in dataclasses.fields(message):  # type: ignore[arg-type]
        value = getattr(message, field.name)
        if (allowed := _allowed(field.name, value)) is not None:
            return f"{field.name}={value!r:.80}: must be {allowed}"
        for part in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(part) and (found := objection(part)):
                return f"{field.name}: {found}"
    return _lease_problem(message) or _book_problem(message)


def _allowed(name: str, value: object) -> str | None:
    """What this field may be; None: it is."""
    if name == "learner" and not is_learner_id(value):
        return "1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit"
    if name == "generation":
        return None if _is_count(value, MAX_GENERATION) else f"0..{MAX_GENERATION - 1}"
    if name in ("step_s", "long_step_s"):
        return None if isinstance(value, float) and 0.0 <= value <= MAX_STEP_S else f"0..{MAX_STEP_S:g} s"
    if name == "tokens_per_s":
        return None if isinstance(value, float) and value >= 0.0 else "at least 0"
    return None if name in NO_LIMIT else _within_limits(name, value)


def _within_limits(name: str, value: object) -> str | None:
    """Rules 1 and 4 for any field."""
    if isinstance(value, int) and not _is_count(value, MAX_COUNT):
        return f"0..{MAX_COUNT - 1}"
    if _is_long(value):
        return f"at most {MAX_CHARS} characters"
    if isinstance(value, tuple):
        most = _SEQUENCES.get(name, MAX_ITEMS)
        if len(value) > most or any(map(_is_long, value)):
            return f"at most {most} of them, each of at most {MAX_CHARS} characters"
    if isinstance(value, dict):
        most, chars = _TABLES.get(name, MAX_ENTRIES), _NAMES.get(name, MAX_CHARS)
        if len(value) > most or any(_is_long(key, chars) or _is_long(item) for key, item in value.items()):
            return f"at most {most} entries, with names of at most {chars} characters, and texts of {MAX_CHARS}"
    return None


def _book_problem(message: object) -> str | None:
    """Whether pending ranges and discarded tokens can be those of this counter."""
    tokens, pending = getattr(message, "tokens", None), getattr(message, "pending", ())
    if long := [ranges for ranges in pending if len(ranges) > MAX_PENDING]:
        return f"{len(long[0])} pending ranges in one fragment: must be at most {MAX_PENDING}"
    for start, stop in (pair for ranges in pending for pair in ranges):
        if not 0 <= start <= stop <= (tokens or 0):
            return f"pending range [{start}, {stop}) of {tokens} tokens: must lie in them"
    counts = (*getattr(message, "landed", ()), *getattr(message, "discarded", {}).values())
    if bad := [count for count in counts if not _is_count(count, MAX_COUNT)]:
        return f"a count of {bad[0]}: must be 0..{MAX_COUNT - 1}"
    return None


def _lease_problem(message: object) -> str | None:
    """Whether spans and data can be what they say."""
    match message:
        case Span(samples=samples, start=start, stop=stop) if start > stop or (start < stop and not samples):
            return f"{samples} samples as tokens [{start}, {stop}): tokens must come from samples"
        case Catalogue(num_sources=num) if not 1 <= num <= MAX_SOURCES:
            return f"num_sources={num}: must be 1..{MAX_SOURCES}"
        case Catalogue(num_ranges=0):
            return "num_ranges=0: must be at least 1, or None"
    return None


def _is_long(value: object, most: int = MAX_CHARS) -> bool:
    return isinstance(value, str) and len(value) > most


def _is_count(value: object, bound: int) -> bool:
    return isinstance(value, int) and 0 <= value < bound
