"""Computes the bandwidth that methods need for a compute utilization, beside published figures: by arithmetic.

python -m tests.bench.bandwidth

1. Utilization is compute time, divided by compute time plus the time that training waits for transfers.
2. Data parallel training reduces its gradients in each step. DiLoCo reduces all outer gradients after H steps,
   Streaming DiLoCo one of P fragments every H / P steps. A ring all-reduce among M sites sends 2 (M - 1) / M of the
   bytes. Transfers are hidden behind the backward pass (two thirds of a step) or, with overlap, behind `TAU` steps.
3. In this package, a learner sends its contribution to the syncer and gets the update from there. Its training waits
   for neither, so utilization is 100 % at any rate (`wide_area.py` measures it). What needs bandwidth is the schedule:
   a fragment goes up in one step and comes down in the next. On a slower link, exchanges are rarer.
4. Published figures come from a simulation of each layer's transfers, on a grid of rates. This arithmetic has no
   layers, and a transfer may end just when its TAU steps are over. So it needs less for the highest utilizations.

Source: arXiv 2501.18512 (steps of each size, H, TAU, published figures); M is our choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_diloco.config import RunConfig
from lightning_diloco.core.quantize import wire_nbytes
from tests.bench import report
from tests.bench.wide_area import PUBLISHED

STEPS_S = {"1B": 0.1, "10B": 0.8, "12B": 2.0, "100B": 4.9}
NUMEL = {"1B": 1e9, "10B": 1e10, "12B": 1.2e10, "100B": 1e11}
SITES, H, P, TAU, BACKWARD = 2, 100, 16, 5, 2 / 3
OFF = 3.0
UTILIZATIONS = (0.5, 0.75, 0.8, 0.9, 0.95, 0.99)
EIGHT_SITES, EIGHT_SITES_DATA_PARALLEL_GBPS = 8, 198.0  # published: 0.84 Gbit/s instead


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Schedule of a method's transfers.

    Args:
        bits: bits per parameter.
        period: steps between two transfers of the same parameter.
        parts: transfers in a period.
        hidden: steps behind which a transfer is hidden.
    """

    bits: float
    period: int = 1
    parts: int = 1
    hidden: float = BACKWARD

    def gbps(self, utilization: float, numel: float, step_s: float, sites: int = SITES) -> float:
        """Return the rate of each site's link in Gbit/s at which training computes for this share of its time."""
        waits_s = self.period * step_s * (1 / utilization - 1) / self.parts
        gbits = 2 * (sites - 1) / sites * self.bits * numel / self.parts / 1e9
        return gbits / (self.hidden * step_s + waits_s)


METHODS = {
    "data parallel": Method(bits=16),
    "DiLoCo": Method(bits=16, period=H),
    "Streaming DiLoCo": Method(bits=16, period=H, parts=P),
    "Streaming DiLoCo, overlap": Method(bits=16, period=H, parts=P, hidden=TAU),
    "Streaming DiLoCo, overlap, int8": Method(bits=8, period=H, parts=P, hidden=TAU),
    "Streaming DiLoCo, overlap, int4": Method(bits=4, period=H, parts=P, hidden=TAU),
}
SAME_AS = {  # names in PUBLISHED
    "data parallel": "data parallel, 10B (published)",
    "Streaming DiLoCo, overlap, int4": "Streaming DiLoCo, 10B (published)",
}


def schedule_gbps(numel: float, step_s: float, config: RunConfig) -> float:
    """Return the rate in Gbit/s, in each direction, at which every fragment is exchanged when it is due (rule 3)."""
    bits = 8 * wire_nbytes(config.block_size, config.wire, config.block_size) / config.block_size
    return bits * numel / config.sync_every / step_s / 1e9


def rows() -> list[dict[str, Any]]:
    """Return a row for each size and method."""
    found: list[dict[str, Any]] = []
    for size, numel in NUMEL.items():
        step_s = STEPS_S[size]
        for name, method in METHODS.items():
            cells = {f"{share:.0%}": method.gbps(share, numel, step_s) for share in UTILIZATIONS}
            found.append({"model": size, "method": name, **cells})
        for wire, period in (("int8", 24), ("int8", H), ("int4", H)):
            rate = schedule_gbps(numel, step_s, RunConfig(wire=wire, sync_every=period))
            found.append({"model": size, "method": f"this package, {wire}, H = {period}", **dict.fromkeys(cells, rate)})
        if size == "10B":
            for line in PUBLISHED.items():
                found.append(_published(*line))
    return found


def _published(name: str, line: dict[float, float]) -> dict[str, Any]:
    return {"model": "10B", "method": name, **{f"{share:.0%}": line.get(share) for share in UTILIZATIONS}}


def off() -> dict[str, float]:
    """Return the largest factor between this arithmetic and the published figures, by method."""
    return {
        name: max(
            math.exp(abs(math.log(METHODS[name].gbps(share, NUMEL["10B"], STEPS_S["10B"]) / gbps)))
            for share, gbps in PUBLISHED[published].items()
        )
        for name, published in SAME_AS.items()
    }


def eight_sites() -> list[dict[str, Any]]:
    """Return what this package needs where data parallel training among eight sites needs the published 198 Gbit/s."""
    per_step = METHODS["data parallel"].gbps(0.5, 1.0, 1.0, EIGHT_SITES)
    found = []
    for wire, period in (("int8", 24), ("int4", 24), ("int4", 48)):
        config = RunConfig(wire=wire, sync_every=period, num_fragments=24)
        gbps = EIGHT_SITES_DATA_PARALLEL_GBPS * schedule_gbps(1.0, 1.0, config) / per_step
        found.append({"run": f"{wire}, H = {period}", "Gbit/s": gbps, "less by": EIGHT_SITES_DATA_PARALLEL_GBPS / gbps})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print and store the tables."""
    args = report.options(__doc__).parse_args(argv)
    found = off()
    checks = {
        f"{name}: at most {factor:.1f} times off the published figures, bound {OFF:g}": factor <= OFF
        for name, factor in found.items()
    }
    return report.conclude(args.out, rows(), checks, eight_sites=eight_sites())


if __name__ == "__main__":
    raise SystemExit(main())
