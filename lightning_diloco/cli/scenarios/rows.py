"""The rows of a forecast: one for each combination of the options' values, and one for each baseline.

All rows are built, and their scenarios checked, before the first one is simulated.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_diloco.cli.planned import durations
from lightning_diloco.cli.scenarios.options import BASELINES, DEFAULTS, TIMES, VARIED, as_file, check_together, dashed
from lightning_diloco.cli.text.quantities import as_time
from lightning_diloco.config import RunConfig
from lightning_diloco.core.quantize import wire_nbytes
from lightning_diloco.errors import ConfigError
from lightning_diloco.planner.bandwidth import Exchange, Machines
from lightning_diloco.planner.memory import FragmentSizes
from lightning_diloco.plots.style import quantity
from lightning_diloco.simulate.chips import Chips
from lightning_diloco.simulate.goodput import Outcome, Scenario, data_parallel, simulate

_OF_THE_RUN = ("quorum", "grace", "sync_every", "overlap")
_GRADIENT_BITS = 16  # bfloat16
_SLICE_CHIPS = 64.0
AS_TIMES = ("grace", "mtbi")  # of the options with several values: those that are times


@dataclass(frozen=True, kw_only=True)
class Row:
    """One combination of options, or a baseline.

    Args:
        options: all options by name, each with one value; None: not given.
        varied: the options that have several values in this forecast, without learners and chips.
        scenario: the fleet that they describe.
    """

    options: Mapping[str, Any]
    varied: Mapping[str, Any]
    scenario: Scenario

    @cached_property
    def found(self) -> Outcome:
        """Return the result; the first access simulates the scenario."""
        if self.baseline is None:
            return simulate(self.scenario)
        return data_parallel(self.scenario, is_elastic=self.baseline == "dp-elastic")

    @property
    def baseline(self) -> str | None:
        """Return the kind of data parallel training; None for learners."""
        kind: str | None = self.options["baseline"]
        return kind

    @property
    def num_learners(self) -> int:
        """Return the number of learners; 1 for data parallel training."""
        return int(self.options["learners"]) if self.baseline is None else 1

    @property
    def chips(self) -> float:
        """Return the number of chips of all learners together."""
        return float(self.options["chips"])

    @property
    def name(self) -> str:
        """Return the name of the simulated training, such as "8 learners" or "data parallel"."""
        if self.baseline is not None:
            return BASELINES[self.baseline]
        return f"{self.num_learners} learner" + "s" * (self.num_learners != 1)

    @property
    def label(self) -> str:
        """Return the name with the options that vary."""
        return ", ".join([self.name, *(f"{dashed(name)} {_short(name, x)}" for name, x in self.varied.items())])

    def figures(self) -> dict[str, Any]:
        """Return the values for `--json`: shares 0..1, times in seconds; and the scenario that repeats this row.

        The scenario of a baseline also has a row of learners.
        """
        found = {field.name: getattr(self.found, field.name) for field in dataclasses.fields(self.found)}
        del found["training"]
        return {"run": self.name, "learners": self.num_learners, "chips": self.chips, **self.varied, **found,
                "scenario": as_file(self.options)}  # fmt: skip


def rows_of(given: Mapping[str, Any]) -> list[Row]:
    """Return the rows of these options, baselines first.

    Raises:
        ConfigError: options do not fit together, or a number is out of range.
    """
    check_together(given)
    rows = [*_baselines(given), *_fleets(given)]
    labels = Counter((row.label, row.chips) for row in rows)
    if equal := sorted({label for (label, _), times in labels.items() if times > 1}):
        raise ConfigError(f"several rows are called {equal[0]!r}; give values that differ by more than a thousandth")
    return rows


def _baselines(given: Mapping[str, Any]) -> Iterator[Row]:
    values = _values(given)
    first = {name: choices[0] for name, choices in values.items()} | {"learners": min(values["learners"])}
    for baseline in dict.fromkeys(given.get("baseline", ())):
        for chips, mtbi_s in itertools.product(values["chips"], values["mtbi"]):
            # Data parallel training has no rounds, so a quorum of the learners does not limit it.
            options = {**first, "quorum": 1, "chips": chips, "mtbi": mtbi_s, "baseline": baseline}
            yield _row(given, options, {"mtbi": mtbi_s} if len(values["mtbi"]) > 1 else {})


def _fleets(given: Mapping[str, Any]) -> Iterator[Row]:
    values = _values(given)
    several = [name for name, choices in values.items() if len(choices) > 1 and name not in ("learners", "chips")]
    for combination in itertools.product(*values.values()):
        options = dict(zip(values, combination, strict=True))
        yield _row(given, {**options, "baseline": None}, {name: options[name] for name in several})


def _values(given: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: list(dict.fromkeys(given.get(name, [DEFAULTS[name]]))) for name in VARIED}


def _row(given: Mapping[str, Any], chosen: Mapping[str, Any], varied: Mapping[str, Any]) -> Row:
    options = {**DEFAULTS, **{name: given[name] for name in DEFAULTS if name in given}, **chosen}
    scenario = _scenario(options)
    chips = scenario.chips
    implied = {"slice": chips.slice_chips, "overlap": scenario.config.overlap}
    implied |= {name: getattr(chips, f"{name}_s") for name in TIMES}
    return Row(options=options | implied, varied=varied, scenario=scenario)


def _scenario(options: Mapping[str, Any]) -> Scenario:
    num_learners, steps_s = options["learners"], tuple(options["step"])
    config = RunConfig.with_defaults({n: options[n] for n in _OF_THE_RUN if options[n] is not None}).validate()
    if config.quorum > num_learners:
        raise ConfigError(
            f"--quorum {config.quorum}: must be at most --learners, {num_learners}; otherwise no round would end"
        )
    site_link = options["site_link"]
    return Scenario(
        num_learners=num_learners,
        chips=_chips(options),
        step_s=steps_s,
        spread=options["spread"],
        jitter=options["jitter"],
        mtbf_s=options["mtbf"],
        rejoin_s=options["rejoin"],
        outage_mtbf_s=options["outage_every"],
        outage_s=options["outage"],
        syncer_mtbf_s=options["syncer_mtbf"],
        syncer_back_s=options["syncer_back"],
        num_shards=options["shards"],
        num_extra=options["extra"] or 0,
        extra_s=options["extra_for"] or 0.0,
        site_s=0.0 if site_link is None else _GRADIENT_BITS * options["parameters"] / site_link,
        duration_s=options["duration"] if options["steps"] is None else options["steps"] * min(steps_s),
        config=config,
        seed=options["seed"],
        **durations(_exchange(options, config), options["rtt"]),
    )


def _chips(options: Mapping[str, Any]) -> Chips:
    num_chips = options["chips"] / options["learners"]
    return Chips(
        count=num_chips,
        slice_chips=min(_SLICE_CHIPS, num_chips) if options["slice"] is None else options["slice"],
        mtbi_s=options["mtbi"],
        failures_per=options["failures_per"],
        **{f"{name}_s": options[name] for name in TIMES if options[name] is not None},
    )


def _exchange(options: Mapping[str, Any], config: RunConfig) -> Exchange:
    p = config.fragments_wanted
    numel = int(options["parameters"] / p / config.block_size + 1) * config.block_size
    nbytes = wire_nbytes(numel, config.wire, config.block_size)
    # The syncer's machine is never the bottleneck here; `diloco plan` checks a real one.
    fleet = Machines(
        num_learners=options["learners"],
        link_bps=options["link"],
        rtt_s=options["rtt"],
        step_s=min(options["step"]),
        syncer_cores=64,
        memory_bytes_per_s=400e9,
        num_shards=options["shards"],
        standby_link_bps=options["standby_link"],
    )
    return Exchange.of(FragmentSizes(numel, numel * p, nbytes, nbytes * p, p), config, fleet)


def _short(name: str, value: Any) -> str:
    return value if isinstance(value, str) else as_time(value) if name in AS_TIMES else quantity(value)
