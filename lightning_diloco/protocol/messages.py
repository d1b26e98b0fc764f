"""What learners and the syncer say to each other on the control connection.

1. Every message is a frozen value. `encode` turns it into a JSON object, `decode` back, and `decode` accepts nothing
   but exact fields of exact types: what comes from the wire is checked here, once, before any machine sees it.
2. Token counts are integers over one learner's own counter. `start` and `stop` bound the half-open range of tokens a
   contribution stands for; `steps` counts inner steps.
3. Tensors never travel here. Bulk headers carry a `Ready` as their description.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Literal

from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.protocol import codec, limits
from lightning_diloco.protocol.codec import Json
from lightning_diloco.protocol.data_ranges import Catalogue, Lease, Span

Scalar = str | int | float | bool | None
Unmerged = Literal["refused", "quarantined", "superseded"]
Fate = Literal["merged", "held", "unknown"] | Unmerged
Phase = Literal["stepping", "evaluating", "draining"]
Reason = Literal["finished", "preempted", "failed"]


@dataclass(frozen=True, slots=True)
class Mark:
    """What one party holds of one fragment, with the proof that it was published (`protocol/syncer/proofs.py`)."""

    generation: int
    version: int
    digest: str
    proof: str = ""


# ---------------------------------------------------------------------------------------------- learner -> syncer


@dataclass(frozen=True, slots=True)
class Hello:
    """Ask to take part, or say that a known process is back.

    Args:
        learner: learner id.
        connection: counts this process's connections; lower ones are dead.
        protocol: version of these messages.
        options: run options this learner insists on.
        run: run id it expects, or None for any.
        known: one mark per fragment, for a process that had already adopted; empty otherwise.
        where: host and process id, for people.
        proof: that a known process takes part, as `Active` brought it.
    """

    learner: str
    connection: int
    protocol: int
    options: dict[str, Scalar]
    run: str | None = None
    known: tuple[Mark, ...] = ()
    where: str = ""
    proof: str = ""


@dataclass(frozen=True, slots=True)
class SeedPlan:
    """The seeder's manifest; the values of all fragments follow on the bulk connection."""

    lease: int
    manifest: Json


@dataclass(frozen=True, slots=True)
class Confirm:
    """This process has adopted every anchor and is ready to step."""

    incarnation: int
    plan_digest: str
    frozen: dict[str, str]
    token_unit: str | None


@dataclass(frozen=True, slots=True)
class Intent:
    """One step ahead: this fragment is due here.

    Args:
        step_s: usual time of the sender's steps.
        patience_s: for how long who drains can wait for those who evaluate, so that their work is merged together.
        long_step_s: time of its long ones; 0: not known.
    """

    fragment: int
    step_s: float
    patience_s: float = 0.0
    long_step_s: float = 0.0

    @property
    def boundary_s(self) -> float:
        """Nearly always, its next step boundary is no further off than this."""
        return max(self.step_s, self.long_step_s)


@dataclass(frozen=True, slots=True)
class Ready:
    """A snapshot was taken; its payload follows on the bulk connection.

    Args:
        spans: the leases that any of these tokens were trained on.
        repeats: ranges of the counter that were trained on samples without a lease.
    """

    fragment: int
    seq: int
    base: int
    generation: int
    start: int
    stop: int
    steps: int
    spans: tuple[Span, ...] = ()
    repeats: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def stop_if(self, kept: float) -> int:
        """Where the merged part of the range ends, if this part (0..1) of the values was merged."""
        return self.start + int(self.tokens * kept)


@dataclass(frozen=True, slots=True)
class Decline:
    """Nothing to contribute to this round."""

    fragment: int
    round: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A learner's own books: where it stands, and what it still holds.

    Args:
        step: inner steps completed.
        tokens: the learner's token counter.
        landed: version landed, per fragment.
        pending: per fragment, the ranges [start, stop) of the counter that are neither landed as merged nor discarded.
        discarded: token x fragment dropped by this learner, by cause.
        generation: the one these books are of.
    """

    step: int
    tokens: int
    landed: tuple[int, ...]
    pending: tuple[tuple[tuple[int, int], ...], ...]
    discarded: dict[str, int] = field(default_factory=dict)
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Still here; sent about once a second. `stop` says why the whole run should end, if it should."""

    phase: Phase
    progress: Progress
    step_s: float
    tokens_per_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class AskRanges:
    """Ask for data ahead of need, and say how far this learner is; repeated.

    Args:
        generation: the one that its tokens are of.
        catalogue: of the data it reads.
        wanted: so many more leases.
        drops: its landing rule drops tokens.
        begun: how far it is with the leases it trains on, or has trained on without hearing that they are done.
        unread: its other leases.
    """

    generation: int
    catalogue: Catalogue
    wanted: int
    drops: bool
    begun: tuple[Span, ...]
    unread: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AskFate:
    """What became of this contribution?"""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class Leave:
    """This process takes part no longer; repeated until acknowledged. `stop` is as in a heartbeat."""

    reason: Reason
    progress: Progress
    tokens_per_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    begun: tuple[Span, ...] = ()
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The last leaver's verdict on the final anchor; None with a reason if it could not be evaluated."""

    eval_loss: float | None
    reason: str | None = None


# ---------------------------------------------------------------------------------------------- syncer -> learner


@dataclass(frozen=True, slots=True)
class SeedGrant:
    """The run is empty: send your values as its start."""

    lease: int
    incarnation: int
    run: str
    options: dict[str, Scalar]


@dataclass(frozen=True, slots=True)
class Welcome:
    """The run exists: adopt these versions, then confirm.

    Args:
        slot: the learner's number in the run, the same over restarts.
        merged: tokens of this process that are merged, per fragment; empty for none at all.
    """

    incarnation: int
    run: str
    manifest: Json
    generations: tuple[int, ...]
    versions: tuple[int, ...]
    slot: int
    merged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Announce:
    """A round of this fragment is open: snapshot at your next step boundary."""

    fragment: int
    round: int


@dataclass(frozen=True, slots=True)
class RunIs:
    """Where the whole run stands; answers every heartbeat.

    Args:
        others_tokens: seen by everybody else so far, and by earlier processes of this learner.
        stopped: why the run is over, if it is: drain and leave.
    """

    others_tokens: int
    stopped: str | None = None


@dataclass(frozen=True, slots=True)
class Active:
    """You take part, of which this is the proof (`protocol/syncer/proofs.py`); step on."""

    announcements: tuple[Announce, ...]
    run: RunIs = RunIs(0)
    proof: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """You cannot join."""

    error: Literal["join", "config", "plan", "fenced"]
    text: str


@dataclass(frozen=True, slots=True)
class Contributor:
    """Names one contribution."""

    learner: str
    incarnation: int
    seq: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A new version of this fragment is durable; fetch it."""

    fragment: int
    generation: int
    version: int
    contributors: tuple[Contributor, ...]


@dataclass(frozen=True, slots=True)
class FateIs:
    """What became of a contribution; `version` is set where it was merged."""

    fragment: int
    seq: int
    fate: Fate
    version: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Leases:
    """What to train on.

    Args:
        leases: those that the question did not name.
        gone: those it named that are done, or somebody else's by now.
    """

    leases: tuple[Lease, ...]
    gone: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaveNoted:
    """Your leave is on record; the last one evaluates the final anchor."""

    is_last: bool


FromLearner = (
    Hello | SeedPlan | Confirm | Intent | Ready | Decline | Heartbeat | AskRanges | AskFate | Leave | Evaluated
)
FromSyncer = SeedGrant | Welcome | Announce | Active | RunIs | Rejected | Commit | FateIs | Leases | LeaveNoted

_KINDS: dict[str, type] = {
    kind.__name__: kind for union in (FromLearner, FromSyncer) for kind in typing.get_args(union)
}


def encode(message: FromLearner | FromSyncer) -> Json:
    """The message as a JSON object; its class name is under "kind"."""
    return {"kind": type(message).__name__, **codec.dump(message)}


def decode(values: object, allowed: object) -> FromLearner | FromSyncer:
    """The inverse of `encode`.

    Args:
        values: a parsed JSON object.
        allowed: `FromLearner` or `FromSyncer`.

    Raises:
        CorruptMessageError: unknown kind, missing or unknown fields, a value of a wrong type, or one that no working
            peer would say.
    """
    if not isinstance(values, dict):
        raise CorruptMessageError(f"found a {type(values).__name__} where a message object is needed; nothing was used")
    fields = dict(values)
    kind = _KINDS.get(str(fields.pop("kind", None)))
    if kind is None or kind not in typing.get_args(allowed):
        raise CorruptMessageError(
            f"found message kind {values.get('kind')!r}; allowed are "
            f"{', '.join(k.__name__ for k in typing.get_args(allowed))}; check that both sides run the same version"
        )
    message: object = codec.load(kind, fields)
    if problem := limits.objection(message):
        raise CorruptMessageError(f"{kind.__name__}: {problem}; nothing was used; do both sides run the same version?")
    return typing.cast("FromLearner | FromSyncer", message)


@dataclass(frozen=True, slots=True)
class News:
    """What a learner hears of the run with every answer of the syncer.

    Args:
        num_learners: that take part now.
        fleet_tokens: seen by all learners so far; the x-axis of every curve.
        cosine: between this learner's last merged contribution and the outer gradient it became part of.
    """

    num_learners: int | None = None
    fleet_tokens: float | None = None
    cosine: float | None = None
