"""Search for the cheapest change that makes an infeasible run feasible.

1. Options are tried before machines, in the order of their cost: a larger overlap, rarer exchanges, smaller fragments,
   a coarser wire precision.
2. Each candidate is checked with the forecast that found the problem.
3. If no option helps enough, the fix names the hardware that is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_diloco.planner.plan import OVERLAP, Forecast, forecast

_COMFORTABLE = 0.9  # highest load under a changed option
_MAX_STRETCH = 16  # longest period that is proposed, in multiples of the present one
_WIRE_BITS = {"int4": 4, "int8": 8, "bf16": 16, "fp32": 32}


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that makes a run feasible.

    Args:
        text: description of the change; options of the run are those of `diloco plan`.
        options: run options that make every rate fit; empty if only machines must change.
    """

    text: str
    options: dict[str, int | str] = dataclasses.field(default_factory=dict)


def cheapest_fix(found: Forecast) -> Fix | None:
    """Return the cheapest fix of an infeasible forecast, or None if the forecast is feasible."""
    if found.is_feasible:
        return None
    needs = [r.more for r in found.resources if r.kind == "capacity" and not r.is_enough]
    options: dict[str, int | str] = {}
    if not _rates_fit(found):
        options = next((change for change in _changes(found) if _rates_fit(_changed(found, change))), {})
        if not options:
            needs += [r.more for r in found.resources if r.kind == "rate" and not r.is_enough]
    said = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    return Fix("; ".join(([said] if said else []) + needs), options)


def _rates_fit(found: Forecast) -> bool:
    return all(r.is_enough for r in found.resources if r.kind == "rate")


def _changed(found: Forecast, options: Mapping[str, int | str]) -> Forecast:
    values: dict[str, Any] = dict(options)
    return forecast(dataclasses.replace(found.scenario, config=dataclasses.replace(found.scenario.config, **values)))


def _changes(found: Forecast) -> Iterator[dict[str, int | str]]:
    """Yield the options to try, the cheapest first: overlap, rarer exchanges, smaller fragments, coarser wire."""
    config = found.scenario.config
    wires = (config.wire, *(wire for wire in ("int8", "int4") if _WIRE_BITS[wire] < _WIRE_BITS[config.wire]))
    for wire in wires:
        cut = [change for parts in (1, 2, 4) if (change := _change(found, wire, parts)) is not None]
        yield from sorted(cut, key=lambda change: change.get("sync_every", 0))


def _change(found: Forecast, wire: str, parts: int) -> dict[str, int | str] | None:
    """Return options that fit if fragments are cut into `parts`; None if the period or the overlap gets too large."""
    config, step_s = found.scenario.config, found.scenario.fleet.step_s
    assert config.num_fragments is not None
    change: dict[str, int | str] = {} if wire == config.wire else {"wire": wire}
    if parts > 1:
        change["num_fragments"] = num_fragments = config.num_fragments * parts
    else:
        num_fragments = config.num_fragments
    loads = _changed(found, {**change, "sync_every": max(config.sync_every, num_fragments)})
    busiest = max(r.load or 0.0 for r in loads.resources if r.kind == "rate" and r.name != OVERLAP)
    wanted = loads.scenario.config.sync_every * max(1.0, busiest / _COMFORTABLE)
    sync_every = math.ceil(wanted / num_fragments) * num_fragments if busiest > 1 else loads.scenario.config.sync_every
    overlap = max(config.overlap, math.ceil(loads.exchange.landing_s / step_s / _COMFORTABLE))
    if sync_every > _MAX_STRETCH * config.sync_every or overlap > min(num_fragments, max(2, sync_every // 4)):
        return None
    if sync_every != config.sync_every:
        change["sync_every"] = sync_every
    if overlap != config.overlap:
        change["overlap"] = overlap
    return change or None
