"""Forecast of the goodput of a run on many chips that fail.

1. Learners and syncer are the state machines of real runs (`fleet.py`). Steps, transfers, merges and failures are
   durations. `chips.py` decides when training pauses. The learner's link continues during a pause.
2. goodput: tokens merged, divided by the tokens that all chips would have trained without failures, at each learner's
   own speed. At the end, each learner drains for at most DRAIN_S; a real one takes as long as it makes progress. work:
   tokens merged, divided by the tokens that the learners of the whole run would have trained without failures. With
   extra learners it can exceed 1; a run of the same tokens then takes 1 / work of the time.
3. uptime: share of the time in which at least one learner trained.
4. Data parallel training is a single learner with all chips and without a syncer. Its communication costs nothing on
   one site. Extra learners are further sites, each as large as the first one, the last one maybe partly used. Each step
   then averages gradients by a ring of all sites, and training restarts when they come and when they leave.

Source: the measures are the paper's (Table 1).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import median

from lightning_diloco.config import RunConfig
from lightning_diloco.errors import ConfigError
from lightning_diloco.simulate.chips import Chips, Pause, pauses, trained_s
from lightning_diloco.simulate.fleet import Fleet
from lightning_diloco.simulate.settings import Network, Pace

# Without a duration: steps of all learners together, and of data parallel training, which is simulated in a second.
LEARNER_STEPS, DATA_PARALLEL_STEPS = 60_000, 1_000_000
_TOKENS = 10_000  # per step
_TICK_S = 1.0
DRAIN_S = 60.0
_LATEST_DRAIN_S = 3600.0
_LEAST_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A fleet and its failures.

    Args:
        num_learners: M, >= 1.
        chips: chips of one learner, which has N / M of the N chips.
        step_s: seconds per inner step; learner k uses value k modulo their number.
        spread: a learner's steps are longer by up to this share, uniformly at random.
        jitter: steps of one learner vary uniformly by this share in both directions.
        mtbf_s: mean time between deaths of a learner's process, each of which loses its unmerged tokens; None: no
            deaths.
        rejoin_s: time from such a death to the first step of the next process.
        outage_mtbf_s: mean time between outages of a learner's link; None: no outages.
        outage_s: duration of an outage. Training continues during an outage.
        syncer_mtbf_s: mean time between failures of the syncer, and of each of its other shards; None: none fails.
        syncer_back_s: time until it, or its standby, serves again with its whole state. Training continues meanwhile.
        num_shards: number of machines that share the fragments, the syncer's and those of its other shards. They fail
            independently. While one of the others is away, only its fragments wait.
        num_extra: number of learners that join in the middle of the run and leave again.
        extra_s: how long the extra learners stay.
        site_s: time to send all gradients from one site to another; only for data parallel training.
        duration_s: simulated time; None: LEARNER_STEPS steps of all learners together, or DATA_PARALLEL_STEPS steps.
        network: times of messages and transfers.
        merge_s: seconds of a merge, and of a commit.
        config: options of the run.
        seed: seed of all randomness.

    Raises:
        ConfigError: a number is out of range.
    """

    num_learners: int
    chips: Chips
    step_s: Sequence[float] = (1.0,)
    spread: float = 0.0
    jitter: float = 0.0
    mtbf_s: float | None = None
    rejoin_s: float = 120.0
    outage_mtbf_s: float | None = None
    outage_s: float = 60.0
    syncer_mtbf_s: float | None = None
    syncer_back_s: float = 60.0
    num_shards: int = 1
    num_extra: int = 0
    extra_s: float = 0.0
    site_s: float = 0.0
    duration_s: float | None = None
    network: Network = field(default_factory=Network)
    merge_s: float = 0.1
    config: RunConfig = field(default_factory=RunConfig)
    seed: int = 1

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ConfigError(problems)

    @property
    def length_s(self) -> float:
        """Return the simulated time."""
        return LEARNER_STEPS * min(self.step_s) / self.num_learners if self.duration_s is None else self.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a simulation.

    Args:
        goodput, uptime: see the module's docstring, 0..1.
        work: see the module's docstring.
        pauses: number of pauses in training, of all learners together.
        rounds: commits of all fragments together; 0 for data parallel training.
        merges: contributions merged.
        participation: contributors divided by learners that were stepping when a round opened; None without rounds.
        discarded: share of the trained tokens that was not merged.
        recovery_s: median time from the death of a learner to the first commit with work of its next process; None if
            no learner died.
        training: (time, learners that train from then on), in order of time.
    """

    goodput: float
    work: float
    uptime: float
    pauses: int
    rounds: int = 0
    merges: int = 0
    participation: float | None = None
    discarded: float = 0.0
    recovery_s: float | None = None
    training: tuple[tuple[float, int], ...] = ()


def simulate(scenario: Scenario) -> Outcome:
    """Simulate the learners and the syncer of a run."""
    until_s, m = scenario.length_s, scenario.num_learners
    fleet = Fleet(
        scenario.config,
        network=scenario.network,
        merge_s=scenario.merge_s,
        seed=scenario.seed,
        expect=m,
        is_audited=False,
        tick_s=min(_TICK_S, *scenario.step_s),
    )
    chance = random.Random(scenario.seed)
    ideal, all_pauses, members = 0.0, [], []
    for k in range(m):
        step_s = scenario.step_s[k % len(scenario.step_s)] * (1 + scenario.spread * chance.random())
        member = _Member(fleet, f"l{k}", _pace(scenario, step_s))
        own = random.Random(f"{scenario.seed} {k}")
        stops = list(pauses(scenario.chips, own, until_s=until_s))
        member.interrupt_at(iter(stops))
        if scenario.mtbf_s is not None:
            member.die(scenario.mtbf_s, scenario.rejoin_s, random.Random(f"{scenario.seed} {k} deaths"), until_s)
        if scenario.outage_mtbf_s is not None:
            links = random.Random(f"{scenario.seed} {k} links")
            member.lose_link(scenario.outage_mtbf_s, scenario.outage_s, links, until_s)
        members.append(member)
        all_pauses.append(_stops_training(stops))
        ideal += until_s / step_s * _TOKENS
    if scenario.syncer_mtbf_s is not None:
        _fail_syncer(fleet, scenario, scenario.syncer_mtbf_s)
    by_name = {member.name: member for member in members}
    fleet.syncer.on_commit = lambda learners: [by_name[x].contributed() for x in learners if x in by_name]
    extra = sum(_visit(fleet, scenario, k) for k in range(scenario.num_extra))
    fleet.run_until(until_s)
    for member in members:
        member.end()
    fleet.run_to_the_end(limit_s=until_s + _LATEST_DRAIN_S)
    fleet.syncer.state.finish()
    totals, counts, p = (
        fleet.syncer.state.ledger.totals(),
        fleet.syncer.state.rounds.counts,
        scenario.config.fragments_wanted,
    )
    training = _training(all_pauses, until_s)
    return Outcome(
        goodput=totals.merged / p / (ideal + extra),
        work=totals.merged / p / ideal,
        uptime=_uptime(training, until_s),
        pauses=sum(map(len, all_pauses)),
        rounds=counts.num_commits,
        merges=counts.num_contributors,
        participation=counts.participation,
        discarded=1 - totals.merged / totals.seen if totals.seen else 0.0,
        recovery_s=median(recoveries) if (recoveries := [x for each in members for x in each.recoveries_s]) else None,
        training=training,
    )


def data_parallel(scenario: Scenario, *, is_elastic: bool) -> Outcome:
    """Simulate one data parallel job on the chips of all learners; its steps take as long as those of the slowest."""
    m, num_extra = scenario.num_learners, scenario.num_extra
    is_long = scenario.duration_s is None and not num_extra  # extra learners stay for a part of the learners' time
    until_s = DATA_PARALLEL_STEPS * max(scenario.step_s) if is_long else scenario.length_s
    changes = [0.0, until_s]
    if num_extra:
        alone_s = (until_s - scenario.extra_s) / 2
        changes[1:1] = [alone_s, alone_s + scenario.extra_s]
    chips = replace(scenario.chips, is_elastic=is_elastic)
    change_s = chips.rescale_s if is_elastic else chips.restart_s
    stops = [Pause(at_s, at_s + change_s, 1.0) for at_s in changes[1:-1]]
    work = 0.0
    for k, (begins_s, ends_s) in enumerate(pairwise(changes)):
        first_s, num = (begins_s + change_s if k else begins_s), m + num_extra * (k == 1)
        of_part, steps = _part(scenario, replace(chips, count=chips.count * num), k, ends_s - first_s)
        stops += [replace(stop, begins_s=first_s + stop.begins_s, ends_s=first_s + stop.ends_s) for stop in of_part]
        work += num / m * steps * max(scenario.step_s) / until_s
    training = _training([stops], until_s)
    return Outcome(
        goodput=work / (1 + num_extra / m * scenario.extra_s / until_s),
        work=work,
        uptime=_uptime(training, until_s),
        pauses=len(stops),
        training=training,
    )


def _part(scenario: Scenario, chips: Chips, k: int, length_s: float) -> tuple[list[Pause], float]:
    """Return the pauses and the steps of part k of a data parallel job, which has the same chips throughout."""
    stops = list(pauses(chips, random.Random(f"{scenario.seed} {k}"), until_s=length_s))
    num_sites = chips.count / (scenario.chips.count * scenario.num_learners)
    step_s = max(scenario.step_s) + 2 * (1 - 1 / num_sites) * scenario.site_s
    return _stops_training(stops), trained_s(stops, step_s=step_s, until_s=length_s) / step_s


def _problems(scenario: Scenario) -> Iterator[str]:
    m, chips, slowest_s = scenario.num_learners, scenario.chips, max(scenario.step_s)
    if m < 1:
        yield f"{m} learners; there must be at least one"
        return
    if chips.count < 1:
        yield (
            f"{chips.count:,.10g} chips for each of {m} learners; each needs at least one chip; take at least {m} in "
            "all, or fewer learners"
        )
    elif not 1 <= chips.slice_chips <= chips.count:
        yield (
            f"slices of {chips.slice_chips:,.10g} chips, and {chips.count:,.10g} chips of each learner; a slice holds "
            "1 chip up to all chips of a learner; choose smaller slices, or fewer learners"
        )
    p = scenario.config.fragments_wanted
    if not 1 <= scenario.num_shards <= p:
        yield f"{scenario.num_shards} shards for {p} fragments; a shard has at least one; choose 1 to {p} shards"
    times = {
        "step": min(scenario.step_s),
        "mean time between interruptions": chips.mtbi_s,
        "mean time between deaths": scenario.mtbf_s,
        "mean time between outages": scenario.outage_mtbf_s,
        "mean time between failures of the syncer": scenario.syncer_mtbf_s,
        "stay of extra learners": scenario.extra_s if scenario.num_extra else None,
    }
    for name, value_s in times.items():
        if value_s is not None and value_s <= 0:
            yield f"the {name} is too short: {value_s:g} s; it must be above 0; choose a longer time"
    length_s = scenario.length_s
    if length_s < _LEAST_STEPS * slowest_s:
        yield (
            f"{length_s:g} s are simulated, and the slowest step takes {slowest_s:g} s; a simulation has at least "
            f"{_LEAST_STEPS} of these steps; simulate at least {_LEAST_STEPS * slowest_s:g} s"
        )
    if scenario.num_extra < 0 or (scenario.num_extra and scenario.extra_s > length_s):
        yield (
            f"{scenario.num_extra} extra learners for {scenario.extra_s:g} s of {length_s:g} s; they stay for a part "
            "of the simulated time; shorten their stay, or simulate for longer"
        )
    if not 0 <= scenario.jitter < 1 or scenario.spread < 0:
        yield f"jitter={scenario.jitter:g}, spread={scenario.spread:g}; jitter is a share below 1, spread is at least 0"


def _pace(scenario: Scenario, step_s: float, *, starts_s: float = 0.0) -> Pace:
    return Pace(step_s=step_s, jitter=scenario.jitter, tokens=_TOKENS, drain_s=DRAIN_S, starts_s=starts_s)


def _visit(fleet: Fleet, scenario: Scenario, k: int) -> float:
    """Schedule an extra learner's stay; returns the tokens that it would train without failures."""
    step_s, begins_s = scenario.step_s[k % len(scenario.step_s)], (scenario.length_s - scenario.extra_s) / 2
    member = _Member(fleet, f"extra{k}", _pace(scenario, step_s, starts_s=begins_s))
    stops = pauses(scenario.chips, random.Random(f"{scenario.seed} extra {k}"), until_s=begins_s + scenario.extra_s)
    member.interrupt_at(stops)
    fleet.at(begins_s + scenario.extra_s, member.end)
    return scenario.extra_s / step_s * _TOKENS


class _Member:
    """One learner of a forecast, over all of its processes."""

    def __init__(self, fleet: Fleet, name: str, pace: Pace) -> None:
        self._fleet, self.name, self._pace = fleet, name, pace
        self.recoveries_s: list[float] = []
        self._deaths: list[tuple[float, float]] = []
        self.process = fleet.start(name, pace)

    def interrupt_at(self, stops: Iterator[Pause]) -> None:
        """Schedule the next pause, which schedules the one after it."""
        pause = next(stops, None)
        if pause is not None:
            self._fleet.at(pause.begins_s, lambda: self._interrupt(pause, stops))

    def _interrupt(self, pause: Pause, stops: Iterator[Pause]) -> None:
        self._pace = self.process.pace = replace(self._pace, tokens=round(_TOKENS * pause.share))
        if self.process.is_stepping:
            self._fleet.interrupt(self.process, pause.ends_s - pause.begins_s)
        else:  # as at the time 0
            self._fleet.stall(self.process, pause.ends_s - pause.begins_s)
        self.interrupt_at(stops)

    def die(self, mtbf_s: float, rejoin_s: float, chance: random.Random, until_s: float) -> None:
        """Schedule deaths of the process, and the starts of those after it."""
        _fail(self._fleet, mtbf_s, chance, until_s, begin=lambda: self._replace(rejoin_s))

    def lose_link(self, mtbf_s: float, outage_s: float, chance: random.Random, until_s: float) -> None:
        """Schedule outages of the link."""
        fleet = self._fleet
        begin, end = (lambda: fleet.cut(self.process)), (lambda: fleet.heal(self.process))
        _fail(fleet, mtbf_s, chance, until_s, begin=begin, lasts_s=outage_s, end=end)

    def contributed(self) -> None:
        """Note that a commit has a contribution of this learner."""
        now_s = self._fleet.now_s
        self.recoveries_s += [now_s - died_s for died_s, back_s in self._deaths if back_s < now_s]
        self._deaths = [death for death in self._deaths if death[1] >= now_s]

    def end(self) -> None:
        """Drain and leave; a process that has not joined yet is killed."""
        if self.process.is_stepping:
            self._fleet.finish(self.process)
        else:
            self._fleet.kill(self.process)

    def _replace(self, rejoin_s: float) -> None:
        self._fleet.kill(self.process)
        self._deaths.append((self._fleet.now_s, self._fleet.now_s + rejoin_s))
        join_s = self._fleet.syncer.state.heartbeat_s  # the syncer waits as long for the old process
        self.process = self._fleet.start(self.name, replace(self._pace, starts_s=max(0.0, rejoin_s - join_s)))


def _fail_syncer(fleet: Fleet, scenario: Scenario, mtbf_s: float) -> None:
    """Schedule failures of the syncer and of each of its other shards."""
    away_s = scenario.syncer_back_s
    for k in range(scenario.num_shards):
        failures = random.Random(f"{scenario.seed} syncer" + (f" {k}" if k else ""))
        lose_shard = partial(fleet.syncer.restart_shard, (k, scenario.num_shards), away_s)
        begin = lose_shard if k else partial(fleet.syncer.suspend, away_s)
        _fail(fleet, mtbf_s, failures, scenario.length_s, begin=begin, lasts_s=away_s)


def _fail(
    fleet: Fleet,
    mtbf_s: float,
    chance: random.Random,
    until_s: float,
    *,
    begin: Callable[[], object],
    lasts_s: float = 0.0,
    end: Callable[[], object] = lambda: None,
) -> None:
    """Schedule a failure, with calls at its beginning and its end, and the next one after its end."""
    at_s = fleet.now_s + chance.expovariate(1 / mtbf_s)
    if at_s < until_s:
        fleet.at(at_s, begin)
        fleet.at(at_s + lasts_s, end)
        fleet.at(at_s + lasts_s, lambda: _fail(fleet, mtbf_s, chance, until_s, begin=begin, lasts_s=lasts_s, end=end))


def _stops_training(stops: Sequence[Pause]) -> list[Pause]:
    """Return the pauses, without one that has ended at time 0 and only sets the share of the slices."""
    return [pause for pause in stops if pause.ends_s > pause.begins_s]


def _training(all_pauses: Sequence[Sequence[Pause]], until_s: float) -> tuple[tuple[float, int], ...]:
    """Return the number of learners that train, at each time when it changes."""
    changes = [(pause.begins_s, -1) for stops in all_pauses for pause in stops]
    changes += [(pause.ends_s, 1) for stops in all_pauses for pause in stops if pause.ends_s < until_s]
    nums = accumulate((change for _, change in sorted(changes)), initial=len(all_pauses))
    return tuple(zip((0.0, *(at_s for at_s, _ in sorted(changes))), nums, strict=True))


def _uptime(training: Sequence[tuple[float, int]], until_s: float) -> float:
    spans = pairwise([*training, (until_s, 0)])
    return sum(min(end_s, until_s) - begin_s for (begin_s, num), (end_s, _) in spans if num) / until_s
