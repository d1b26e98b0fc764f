"""Timing of a fragment exchange, its load on links, merge thread and disk, and the total traffic of a run.

    snapshot -> ready, upload -> merge, outer step -> log, standby -> commit message, download -> next step boundary

1. Links are full duplex. A stream gets LINK_SHARE of its link and at most STREAM_BPS; each direction is one TLS
   connection.
2. All members of a round upload at once, and all learners download at once. They share the syncer's link.
3. The syncer merges one fragment at a time, with all its cores. A merge takes as long as the computation or the memory
   traffic, whichever takes longer. The time per core was measured with one and two cores; for more it is an assumption.
4. Data parallel training needs the bandwidth of a ring all-reduce of the gradients in every step.

Source: our choice; the constants were measured on a 2-core machine, see their comments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_diloco.config import RunConfig
from lightning_diloco.errors import ConfigError
from lightning_diloco.planner.memory import FragmentSizes, Training

LINK_SHARE = 0.8  # one stream over 40 ms at 2 Gbit/s: 0.70 .. 0.92 of a raw socket
STREAM_BPS = 6e9  # one TLS stream tops out near 0.8 GB/s
DISK_BYTES_PER_S = 1e9
MEMORY_BYTES_PER_S = 20e9  # one core, other cores idle
# Seconds of one core per value of a fragment, int8, by the compiled loops: see tests/bench/syncer_round.py.
CONTRIBUTION_S, PAIR_S = 0.12e-9, 0.084e-9  # each contribution is added up, each pair is compared
OUTER_S = 1.0e-9  # outer step and publication
DIGEST_S = 2.6e-9  # by one core, while the log is written
# Bytes of memory traffic per value: contributions are read twice; new memory costs more than its own writing.
_MERGE_BYTES, _OUTER_BYTES = 2, 1.4 * 27

_BITS = 8
_FLOAT32_BYTES = 4
_LOG_BYTES = 2  # bfloat16 outer gradient
_RECORD_BYTES = 1024  # header of a commit's log record, rounded up


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The machines of a fleet and their links.

    Args:
        num_learners: M.
        link_bps: bits per second of each learner's link, in each direction.
        rtt_s: round trip time between a learner and the syncer.
        step_s: duration of an inner step.
        syncer_link_bps: bits per second of the syncer's link; None: M times link_bps, so that it is never the
            bottleneck.
        disk_bytes_per_s: write rate of the syncer's disk, fsync included.
        syncer_cores: cores of the syncer's machine.
        memory_bytes_per_s: bytes per second that the syncer's memory moves, with all cores.
        num_shards: machines that share the fragments, each like the syncer's; 1: the syncer alone.
        standby_link_bps: bits per second between each of these machines and its standby, which is rtt_s away; None:
            there is no standby.

    Raises:
        ConfigError: there is no learner or no core, or a rate or a duration is not above 0.
    """

    num_learners: int = 2
    link_bps: float = 1e9
    rtt_s: float = 0.04
    step_s: float = 1.0
    syncer_link_bps: float | None = None
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    syncer_cores: int = 2
    memory_bytes_per_s: float = MEMORY_BYTES_PER_S
    num_shards: int = 1
    standby_link_bps: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_learners", "syncer_cores"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: found {getattr(self, name)}; must be at least 1")
        rates = ("link_bps", "syncer_link_bps", "standby_link_bps", "disk_bytes_per_s", "memory_bytes_per_s")
        for name in ("step_s", *rates):
            if (found := getattr(self, name)) is not None and not found > 0:
                raise ConfigError(f"{name}: found {found}; must be above 0")
        if self.rtt_s < 0:
            raise ConfigError(f"rtt_s: found {self.rtt_s}; must be at least 0")

    def share(self, num_fragments: int) -> float:
        """Return the share of the fragments on the machine that has the most."""
        return math.ceil(num_fragments / self.num_shards) / num_fragments

    @property
    def learner_stream_bps(self) -> float:
        """Return the usable bits per second of one learner that transfers alone."""
        return min(STREAM_BPS, LINK_SHARE * self.link_bps)

    @property
    def syncer_usable_bps(self) -> float:
        """Return the usable bits per second of the syncer, for all learners together."""
        return LINK_SHARE * (self.syncer_link_bps or self.num_learners * self.link_bps)

    @property
    def standby_stream_bps(self) -> float | None:
        """Return the usable bits per second to the standby; None without one."""
        return None if self.standby_link_bps is None else min(STREAM_BPS, LINK_SHARE * self.standby_link_bps)

    @property
    def stream_bps(self) -> float:
        """Return the usable bits per second of one learner while all learners transfer."""
        return min(self.learner_stream_bps, self.syncer_usable_bps / self.num_learners)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Times of one exchange, for the largest fragment.

    Args:
        upload_s: upload of one contribution while all learners upload.
        download_s: download of one update while all learners download.
        merge_s: merge and outer step.
        log_s: durable write of the redo log's record; the digest is computed meanwhile.
        standby_s: copy of this record to the standby's disk; 0 without a standby.
        landing_s: from snapshot to landing, without the wait for the next step boundary.
        overlap_s: time that the schedule allows for this: `overlap` steps.
        period_s: time between two fragments.
        adopt_s: download of the whole anchor, for which a joining learner waits.
    """

    upload_s: float
    download_s: float
    merge_s: float
    log_s: float
    standby_s: float
    landing_s: float
    overlap_s: float
    period_s: float
    adopt_s: float

    @classmethod
    def of(cls, sizes: FragmentSizes, config: RunConfig, fleet: Machines) -> Exchange:
        """Compute the times for these fragments in this fleet."""
        transfer_s = fleet.rtt_s + _BITS * sizes.nbytes / fleet.stream_bps
        merge_s = sizes.numel * merge_s_per_value(fleet)
        log_s = sizes.numel * max(_LOG_BYTES / fleet.disk_bytes_per_s, DIGEST_S)
        standby_s = 0.0
        if (standby_bps := fleet.standby_stream_bps) is not None:
            record = _LOG_BYTES * sizes.numel + _RECORD_BYTES
            standby_s = fleet.rtt_s + _BITS * record / standby_bps + record / fleet.disk_bytes_per_s
        adopt_s = _BITS * _FLOAT32_BYTES * sizes.total_numel / fleet.learner_stream_bps
        return cls(
            upload_s=transfer_s,
            download_s=transfer_s,
            merge_s=merge_s,
            log_s=log_s,
            standby_s=standby_s,
            landing_s=fleet.rtt_s + transfer_s + merge_s + log_s + standby_s + transfer_s,
            overlap_s=config.overlap * fleet.step_s,
            period_s=config.sync_every * fleet.step_s / sizes.count,
            adopt_s=adopt_s,
        )


def merge_s_per_value(fleet: Machines) -> float:
    """Return the seconds, per value of a fragment, of a merge of all learners' contributions and of the outer step."""
    m, cores, memory = fleet.num_learners, fleet.syncer_cores, fleet.memory_bytes_per_s
    pairs = m * (m + 1) / 2
    merging_s = max((CONTRIBUTION_S * m + PAIR_S * pairs) / cores, _MERGE_BYTES * (m + 1) / memory)
    return merging_s + max(OUTER_S / cores, _OUTER_BYTES / memory)


def sweep_s(config: RunConfig, fleet: Machines) -> float:
    """Return the time in which every fragment is exchanged once."""
    return config.sync_every * fleet.step_s


def learner_bps(sizes: FragmentSizes, config: RunConfig, fleet: Machines) -> float:
    """Return the average bits per second of one learner, in each direction."""
    return _BITS * sizes.total_nbytes / sweep_s(config, fleet)


def data_parallel_bps(training: Training, fleet: Machines) -> float:
    """Return the bits per second, per link and direction, with which a data parallel all-reduce fits into a step."""
    m = fleet.num_learners
    gradients = training.num_trainable * min(training.param_bytes, training.compute_bytes)
    return _BITS * 2 * (m - 1) / m * gradients / fleet.step_s


def log_bytes_per_s(sizes: FragmentSizes, config: RunConfig, fleet: Machines) -> float:
    """Return the growth of the redo log."""
    return (_LOG_BYTES * sizes.total_numel + _RECORD_BYTES * sizes.count) / sweep_s(config, fleet)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Totals of a whole run without failures.

    Args:
        rounds: number of commits, including those of the drain.
        bytes_up: bytes received by the syncer, including start values.
        bytes_down: bytes sent by the syncer, including the adoption at the start.
        log_bytes: bytes written to the redo log.
    """

    rounds: float
    bytes_up: float
    bytes_down: float
    log_bytes: float

    @classmethod
    def of(cls, sizes: FragmentSizes, config: RunConfig, *, num_learners: int, num_steps: int) -> Totals:
        """Compute the totals for learners that train `num_steps` steps each."""
        # Fragments with a slot before H - tau skip the first one, which is too soon after the adoption.
        # At the end, learners leave one after another, and the remaining ones contribute in each drain.
        skipped = 1 - config.overlap / config.sync_every
        periods, m = max(0.0, num_steps / config.sync_every - skipped), num_learners
        num_rounds = (periods + m) * sizes.count
        moved = (periods * m + m * (m + 1) / 2) * sizes.total_nbytes
        anchor = _FLOAT32_BYTES * sizes.total_numel
        record = _LOG_BYTES * sizes.total_numel / sizes.count + _RECORD_BYTES
        return cls(
            rounds=num_rounds,
            bytes_up=anchor + moved,
            bytes_down=m * anchor + moved,
            log_bytes=num_rounds * record,
        )
