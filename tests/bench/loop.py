"""CPU seconds of the syncer's loop thread per second of a run, by the number of learners.

python -m tests.bench.loop --learners 16 64 256 --out tests/bench/results/loop.json

1. The service is that of real runs, with its log and tape on disk. The learners' state machines send what they send in
   a run: heartbeats, requests for leases, intents, readies and payloads. A step takes a second.
2. Time is virtual, so that a busy machine measures the same fleet. The bench measures the CPU time of the loop thread's
   work: events, ticks, actions, and the figures for `status`. Arithmetic and the decoding of messages belong to other
   threads; they are not done or not counted here.
3. The measurement begins after WARM_UP_PERIODS of H steps, when leases come and go. Everything runs in one thread, one
   fleet after another.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning_diloco.config import RunConfig
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.simulate.fleet import Fleet, Network, Pace
from lightning_diloco.simulate.reading import Data
from lightning_diloco.simulate.syncer import SimulatedSyncer
from lightning_diloco.syncer.inbox import TICK_S
from lightning_diloco.syncer.options import SyncerOptions
from lightning_diloco.syncer.service import SyncerService
from lightning_diloco.syncer.store import SyncerStore
from tests.bench import report

NUM_FRAGMENTS = 96
STEP_S, TOKENS = 1.0, 100
LEARNER_TICK_S = 0.25
HELD_S = 60.0  # a lease: 30 s unread, and until what was read is merged in the last fragment, and settled
WARM_UP_PERIODS = 1.2
BOUND = 0.1  # CPU seconds a second, of BOUND_AT learners
BOUND_AT = 64


class TimedService(SyncerService):
    """A service without threads and tensors.

    Attributes:
        aside: actions that send messages, and those that other threads would carry out.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(SyncerOptions(run_dir=run_dir), run="loop", durable=SyncerStore(run_dir))
        self.aside: list[do.SyncerAction] = []

    def handle(self, event: on.SyncerEvent, now_s: float) -> None:
        """Handle an event as the loop thread does."""
        (self._tick if isinstance(event, on.Tick) else self._handle)(event, now_s)

    def _carry_out(self, action: do.SyncerAction) -> None:
        if not isinstance(action, do.Merge | do.Apply | do.StoreSeed | do.DropPayload):
            super()._carry_out(action)
        self.aside.append(action)


class TimedSyncer(SimulatedSyncer):
    """The service in place of a simulated syncer.

    Attributes:
        cpu_s: of the loop so far.
    """

    def __init__(self, *around: Any, service: TimedService, **options: Any) -> None:
        super().__init__(*around, **options)
        self.service, self.state = service, service.state
        self.cpu_s = 0.0

    def handle(self, event: on.SyncerEvent) -> None:
        """Handle an event as the loop thread does, then carry out the actions of other threads."""
        began_s = time.thread_time()
        self.service.handle(event, self._timeline.now_s)
        self.cpu_s += time.thread_time() - began_s
        self._world.saw("syncer", event)
        aside, self.service.aside = self.service.aside, []
        for action in aside:
            self._do(action)


class LoopFleet(Fleet):
    """Learners that train in virtual time, and a service whose CPU time is counted."""

    syncer: TimedSyncer

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self._run_dir = run_dir
        super().__init__(config, network=Network(latency_s=0.01, upload_s=0.4, download_s=0.4), merge_s=0.05)
        self.invariants = SimpleNamespace(after_syncer_event=_nothing, after_learner_event=_nothing)  # type: ignore[assignment]
        self._after(TICK_S, self._syncer_ticks)

    def _made_syncer(self, **options: Any) -> TimedSyncer:
        return TimedSyncer(
            self, self.config, self._timeline, self.random, service=TimedService(self._run_dir), **options
        )

    def _syncer_ticks(self) -> None:
        self.syncer.handle(on.Tick())
        self._after(TICK_S, self._syncer_ticks)

    def _tick(self) -> None:
        for learner in list(self.learners.values()):
            if learner.connection and learner.state is None:
                self._say(learner, self._hello(learner))
            else:
                self._learner_handles(learner, on.Tick())
        self._after(LEARNER_TICK_S, self._tick)


def _nothing(*_: object) -> None:
    pass


def measure(num_learners: int, *, leases: int, num_fragments: int, measured_s: float) -> dict[str, Any]:
    """Measure one fleet.

    Returns:
        CPU seconds of the loop per second, events per second, leases held per learner.
    """
    config = RunConfig(sync_every=num_fragments, num_fragments=num_fragments)
    range_size = round((num_fragments * STEP_S + HELD_S) * TOKENS / STEP_S / leases)
    data, offsets = Data(sizes=(10**9,), range_size=range_size), random.Random(0)
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as run_dir:
        fleet = LoopFleet(Path(run_dir), config)
        for k in range(num_learners):
            pace = Pace(step_s=STEP_S, jitter=0.02, tokens=TOKENS, starts_s=offsets.uniform(0.0, STEP_S), data=data)
            fleet.start(f"l{k}", pace)
        fleet.run_for(WARM_UP_PERIODS * num_fragments * STEP_S)
        before = fleet.syncer.cpu_s, fleet.num_events, fleet.syncer.state.rounds.counts.num_commits
        fleet.run_for(measured_s)
        commits = fleet.syncer.state.rounds.counts.num_commits - before[2]
        found = {
            "run": f"M = {num_learners}",
            "cpu_s_per_s": (fleet.syncer.cpu_s - before[0]) / measured_s,
            "events_per_s": (fleet.num_events - before[1]) / measured_s,
            "commits_per_s": commits / measured_s,
            "leases_each": len(fleet.syncer.state.leases.held) / num_learners,
            "participation": fleet.participation,
        }
        fleet.syncer.service.stop()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if the bound is missed."""
    parser = report.options(__doc__)
    parser.add_argument("--learners", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--leases", type=int, default=128, help="that each learner holds, about")
    parser.add_argument("--fragments", type=int, default=NUM_FRAGMENTS)
    parser.add_argument("--measured-s", type=float, default=20.0, help="of virtual time")
    args = parser.parse_args(argv)
    given = {"leases": args.leases, "num_fragments": args.fragments, "measured_s": args.measured_s}
    rows = [measure(num_learners, **given) for num_learners in args.learners]
    checks = {
        f"{row['cpu_s_per_s']:.3f} CPU seconds a second with M = {num_learners}, bound {BOUND}": bool(
            row["cpu_s_per_s"] <= BOUND
        )
        for num_learners, row in zip(args.learners, rows, strict=True)
        if num_learners <= BOUND_AT
    }
    return report.conclude(args.out, rows, checks, fragments=args.fragments)


if __name__ == "__main__":
    raise SystemExit(main())
