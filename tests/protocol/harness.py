"""Drives the state machines event by event, and reads their actions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

from lightning_diloco.config import PROTOCOL_VERSION, RunConfig
from lightning_diloco.core.schedule import fragment_due
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.data_ranges import Catalogue, Span
from lightning_diloco.protocol.learner.machine import LearnerState
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.machine import SyncerState

T = TypeVar("T")


def of_kind(actions: Iterable[object], kind: type[T]) -> list[T]:
    """Return the actions of this kind, in order."""
    return [action for action in actions if isinstance(action, kind)]


def manifest(config: RunConfig) -> dict[str, Any]:
    return {
        "config": config.to_dict(),
        "num_fragments": config.fragments_wanted,
        "plan_digest": "plan",
        "frozen": {"base": "f00"},
        "token_unit": "tokens",
    }


def confirm(incarnation: int = 1, **changes: Any) -> messages.Confirm:
    fields = {"plan_digest": "plan", "frozen": {"base": "f00"}, "token_unit": "tokens", **changes}
    return messages.Confirm(incarnation, **fields)


def ready(p: int = 0, *, seq: int = 1, start: int = 0, stop: int = 100, base: int = 0, **more: int) -> messages.Ready:
    fields = {"generation": 0, "steps": 4, **more}
    return messages.Ready(fragment=p, seq=seq, base=base, start=start, stop=stop, **fields)


class Syncer:
    """A syncer with a clock. `tell`, `payload` and so on return the actions of one event; `log` collects records.

    Args:
        learners: learners that are active from the start; all of them step.
        config: options of the run, in addition to two fragments and H = 4.
    """

    def __init__(self, *learners: str, expect: int | None = None, **config: Any) -> None:
        self.config = RunConfig(**{"sync_every": 4, "num_fragments": 2, "overlap": 1, **config})
        flags: dict[str, messages.Scalar] = {name: config[name] for name in ("data_parts",) if name in config}
        self.state = SyncerState(run="r", expect=expect, options=flags, secret="secret")
        self.now_s = 100.0
        self.log: list[records.LogRecord] = []
        self.applying: dict[int, do.Apply] = {}
        if learners:
            self.seed(learners[0])
        for learner in learners:
            self.join(learner)
            self.beat(learner)

    def handle(self, event: on.SyncerEvent) -> list[do.SyncerAction]:
        actions = self.state.handle(event, self.now_s)
        self.log += [records.decode(action.values) for action in of_kind(actions, do.Record)]
        self.applying.update({action.fragment: action for action in of_kind(actions, do.Apply)})
        return actions

    def tell(self, session: str, message: messages.FromLearner) -> list[do.SyncerAction]:
        return self.handle(on.FromALearner(session, message))

    def tick(self, after_s: float = 0.0) -> list[do.SyncerAction]:
        self.now_s += after_s
        return self.handle(on.Tick())

    def hello(self, session: str, learner: str | None = None, **fields: Any) -> list[do.SyncerAction]:
        hello = {"connection": 1, "protocol": PROTOCOL_VERSION, "options": {}, **fields}
        return self.tell(session, messages.Hello(learner or session, **hello))

    def seed(self, session: str) -> None:
        self.hello(session)
        self.tell(session, messages.SeedPlan(1, manifest(self.config)))
        self.handle(on.SeedStored(1, ("start",) * self.config.fragments_wanted))

    def join(self, session: str, learner: str | None = None, incarnation: int = 1) -> list[do.SyncerAction]:
        self.hello(session, learner)
        return self.tell(session, confirm(incarnation))

    def beat(
        self,
        session: str,
        *,
        tokens: int = 100,
        phase: messages.Phase = "stepping",
        stop: str | None = None,
        **fields: Any,
    ) -> list[Any]:
        num = self.config.fragments_wanted
        progress = {"step": 4, "landed": (0,) * num, "pending": (((0, tokens),),) * num, **fields}
        books = messages.Progress(tokens=tokens, **progress)
        return self.tell(session, messages.Heartbeat(phase, books, 1.0, 25.0, stop=stop))

    def ask_ranges(
        self, session: str, *begun: Span, wanted: int = 0, unread: tuple[int, ...] = (), num_ranges: int | None = None
    ) -> list[do.SyncerAction]:
        """Return a request for leases of three sources."""
        catalogue = Catalogue("text", 3, num_ranges)
        asked = messages.AskRanges(self.state.rounds.generation, catalogue, wanted, False, begun, unread)
        return self.tell(session, asked)

    def intent(self, session: str, p: int = 0) -> list[do.SyncerAction]:
        return self.tell(session, messages.Intent(p, 1.0))

    def payload(self, session: str, description: messages.Ready, error: str | None = None) -> list[do.SyncerAction]:
        return self.handle(on.PayloadReceived(session, description, error))

    def contribute(self, session: str, description: messages.Ready) -> list[do.SyncerAction]:
        """Send metadata and payload."""
        return self.tell(session, description) + self.payload(session, description)

    def merge(self, p: int = 0, **verdicts: on.Verdict) -> list[do.SyncerAction]:
        """Report that the outer gradient of the round is computed, or that contributions to it were refused."""
        return self.handle(on.Merged(p, self.round(p).number, {}, verdicts))

    def proved(self, p: int, generation: int, version: int, digest: str) -> messages.Mark:
        """Return a learner's mark of a version that a syncer of this run has published."""
        return messages.Mark(generation, version, digest, self.state.proof(p, generation, version, digest))

    def commit(self, p: int = 0) -> list[do.SyncerAction]:
        """Report that the open round is merged and committed."""
        self.merge(p)
        return self.committed(p)

    def committed(self, p: int = 0) -> list[do.SyncerAction]:
        """Report that the commit in progress is on disk."""
        action = self.applying.pop(p)
        self.log.append(records.decode(action.record))
        return self.handle(on.Committed(p, action.round, f"{p}@{action.record['version']}"))

    def full_round(self, p: int = 0, **contributions: messages.Ready) -> list[do.SyncerAction]:
        """Run a round from the first intent to the commit."""
        self.intent(next(iter(contributions)), p)
        for session, description in contributions.items():
            self.contribute(session, description)
        if self.round(p).stage == "collecting":
            self.tick(4.0)
        return self.commit(p)

    def round(self, p: int = 0) -> Any:
        return self.state.rounds.fragments[p].round

    def version(self, p: int = 0) -> int:
        return self.state.rounds.fragments[p].version

    def restarted(self) -> Syncer:
        """Return a syncer that is restored from the records so far."""
        new = Syncer.__new__(Syncer)
        new.config, new.now_s, new.log, new.applying = self.config, self.now_s, list(self.log), {}
        new.state = SyncerState(run="r")
        for record in self.log:
            new.state.apply(record)
        new.state.resume(self.now_s)
        return new


def said(actions: Iterable[object], session: str, kind: type[T] = object) -> list[T]:  # type: ignore[assignment]
    """Return the messages of this kind that were sent to this session."""
    messages_ = (action.message for action in of_kind(actions, do.Send) if action.session == session)
    return [message for message in messages_ if isinstance(message, kind)]


def members(actions: Iterable[object]) -> list[str]:
    """Return the sessions whose contributions are to be merged."""
    (merge,) = of_kind(actions, do.Merge)
    return [contribution.session for contribution in merge.contributions]


class Learner:
    """A learner with a clock that trains 10 tokens per step; `actions` has the actions of the last event."""

    def __init__(self, *, num_fragments: int = 2, sync_every: int = 4, overlap: int = 1, **options: Any) -> None:
        self.state = LearnerState(
            learner="a",
            incarnation=1,
            generations=(0,) * num_fragments,
            versions=(0,) * num_fragments,
            due=partial(fragment_due, sync_every=sync_every, num_fragments=num_fragments),
            sync_every=sync_every,
            overlap=overlap,
            **options,
        )
        self.now_s = 100.0
        self.actions: list[do.LearnerAction] = []

    def handle(self, event: on.LearnerEvent, after_s: float = 0.0) -> list[do.LearnerAction]:
        self.now_s += after_s
        self.actions = self.state.handle(event, self.now_s)
        return self.actions

    def step(self, times: int = 1) -> list[do.LearnerAction]:
        """Make these steps; return all of their actions."""
        return [
            action
            for _ in range(times)
            for action in self.handle(on.StepDone(self.state.step + 1, self.state.tokens + 10), 1.0)
        ]

    def hear(self, message: messages.FromSyncer) -> list[do.LearnerAction]:
        return self.handle(on.FromTheSyncer(message))

    def snapshot(self, p: int = 0, round_: int = 1) -> messages.Ready:
        """Announce a round, step, and encode the payload; return its description."""
        self.hear(messages.Announce(p, round_))
        (action,) = of_kind(self.step(), do.Snapshot)
        self.handle(on.Encoded(p, action.ready.seq))
        return action.ready

    def commit(self, p: int = 0, version: int = 1, seq: int | None = None) -> list[do.LearnerAction]:
        """Receive a commit; with `seq`, it names this learner's contribution."""
        contributors = (messages.Contributor("a", 1, seq),) if seq is not None else ()
        return self.hear(messages.Commit(p, self.state.generation, version, contributors))

    def land(self, p: int = 0, version: int = 1, seq: int | None = None, *, is_full: bool = False) -> list[Any]:
        """Stage an update, which lands at the next step."""
        self.handle(on.Staged(p, self.state.generation, version, seq, is_full))
        return self.step()

    @property
    def says(self) -> list[object]:
        """Return the messages among the actions of the last event."""
        return [action.message for action in of_kind(self.actions, do.Say)]

    def books(self) -> tuple[int, int]:
        """Return token x fragment seen, and the sum of merged, discarded and pending."""
        progress = self.state.progress
        pending = sum(stop - start for ranges in progress.pending for start, stop in ranges)
        merged = sum(f.merged_tokens for f in self.state.fragments)
        return progress.tokens * len(self.state.fragments), merged + pending + sum(progress.discarded.values())
