"""What learners and the syncer say to each other on the control connection.

1. Every message is a frozen value. `encode` turns it into a JSON object, `decode` back, and `decode` accepts nothing
   but exact fields of exact types within their bounds (`limits.py`): what comes from the wire is checked here, once,
   before any machine sees it.
2. Token counts are integers over one learner's own counter. `start` and `stop` bound the half-open range of tokens a
   contribution stands for; `steps` counts inner steps.
3. Tensors never travel here. Bulk headers carry a `Ready` as their description.
"""

from __future__ import annotations

import typing
from typing import Annotated, Literal

from msgspec import Meta, field

from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.codec import Json, Tagged, Value
from lightning_diloco.protocol.data_ranges import Catalogue, Lease, Span
from lightning_diloco.protocol.limits import (
    MAX_LEASES,
    Causes,
    Count,
    Finite,
    Generation,
    Items,
    LearnerId,
    Metrics,
    Named,
    OfLeases,
    Options,
    Pending,
    Range,
    Rate,
    StepTime,
    Text,
)

Unmerged = Literal["refused", "quarantined", "superseded"]
Fate = Literal["merged", "held", "unknown"] | Unmerged
Phase = Literal["stepping", "evaluating", "draining"]
Reason = Literal["finished", "preempted", "failed"]


class Mark(Value, frozen=True):
    """What one party holds of one fragment, with the proof that it was published (`protocol/syncer/proofs.py`)."""

    generation: Generation
    version: Count
    digest: Text
    proof: Text = ""


# ---------------------------------------------------------------------------------------------- learner -> syncer


class Hello(Tagged, frozen=True):
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

    learner: LearnerId
    connection: Count
    protocol: Count
    options: Options
    run: Text | None = None
    known: Items[Mark] = ()
    where: Text = ""
    proof: Text = ""


class SeedPlan(Tagged, frozen=True):
    """The seeder's manifest; the values of all fragments follow on the bulk connection."""

    lease: Count
    manifest: Json


class Confirm(Tagged, frozen=True):
    """This process has adopted every anchor and is ready to step."""

    incarnation: Count
    plan_digest: Text
    frozen: Named
    token_unit: Text | None


class Intent(Tagged, frozen=True):
    """One step ahead: this fragment is due here.

    Args:
        step_s: usual time of the sender's steps.
        patience_s: for how long who drains can wait for those who evaluate, so that their work is merged together.
        long_step_s: time of its long ones; 0: not known.
    """

    fragment: Count
    step_s: StepTime
    patience_s: Rate = 0.0
    long_step_s: StepTime = 0.0

    @property
    def boundary_s(self) -> float:
        """Nearly always, its next step boundary is no further off than this."""
        return max(self.step_s, self.long_step_s)


class Ready(Tagged, frozen=True):
    """A snapshot was taken; its payload follows on the bulk connection.

    Args:
        spans: the leases that any of these tokens were trained on.
        repeats: ranges of the counter that were trained on samples without a lease.
    """

    fragment: Count
    seq: Count
    base: Count
    generation: Generation
    start: Count
    stop: Count
    steps: Count
    spans: OfLeases[Span] = ()
    repeats: OfLeases[Range] = ()

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def stop_if(self, kept: float) -> int:
        """Where the merged part of the range ends, if this part (0..1) of the values was merged."""
        return self.start + int(self.tokens * kept)


class Decline(Tagged, frozen=True):
    """Nothing to contribute to this round."""

    fragment: Count
    round: Count


class Progress(Value, frozen=True):
    """A learner's own books: where it stands, and what it still holds.

    Args:
        step: inner steps completed.
        tokens: the learner's token counter.
        landed: version landed, per fragment.
        pending: per fragment, the ranges [start, stop) of the counter that are neither landed as merged nor discarded.
        discarded: token x fragment dropped by this learner, by cause.
        generation: the one these books are of.
    """

    step: Count
    tokens: Count
    landed: Items[Count]
    pending: Items[Pending]
    discarded: Causes = field(default_factory=dict)
    generation: Generation = 0


class Heartbeat(Tagged, frozen=True):
    """Still here; sent about once a second. `stop` says why the whole run should end, if it should."""

    phase: Phase
    progress: Progress
    step_s: StepTime
    tokens_per_s: Rate
    metrics: Metrics = field(default_factory=dict)
    stop: Text | None = None


class AskRanges(Tagged, frozen=True):
    """Ask for data ahead of need, and say how far this learner is; repeated.

    Args:
        generation: the one that its tokens are of.
        catalogue: of the data it reads.
        wanted: so many more leases.
        drops: its landing rule drops tokens.
        begun: how far it is with the leases it trains on, or has trained on without hearing that they are done.
        unread: its other leases.
    """

    generation: Generation
    catalogue: Catalogue
    wanted: Count
    drops: bool
    begun: OfLeases[Span]
    unread: OfLeases[Count]


class AskFate(Tagged, frozen=True):
    """What became of this contribution?"""

    fragment: Count
    seq: Count


class Leave(Tagged, frozen=True):
    """This process takes part no longer; repeated until acknowledged. `stop` is as in a heartbeat."""

    reason: Reason
    progress: Progress
    tokens_per_s: Rate
    metrics: Metrics = field(default_factory=dict)
    begun: OfLeases[Span] = ()
    stop: Text | None = None


class Evaluated(Tagged, frozen=True):
    """The last leaver's verdict on the final anchor; None with a reason if it could not be evaluated."""

    eval_loss: Finite | None
    reason: Text | None = None


# ---------------------------------------------------------------------------------------------- syncer -> learner


class SeedGrant(Tagged, frozen=True):
    """The run is empty: send your values as its start."""

    lease: Count
    incarnation: Count
    run: Text
    options: Options


class Welcome(Tagged, frozen=True):
    """The run exists: adopt these versions, then confirm.

    Args:
        slot: the learner's number in the run, the same over restarts.
        merged: tokens of this process that are merged, per fragment; empty for none at all.
    """

    incarnation: Count
    run: Text
    manifest: Json
    generations: Items[Generation]
    versions: Items[Count]
    slot: Count
    merged: Items[Count] = ()


class Announce(Tagged, frozen=True):
    """A round of this fragment is open: snapshot at your next step boundary."""

    fragment: Count
    round: Count


class RunIs(Tagged, frozen=True):
    """Where the whole run stands; answers every heartbeat.

    Args:
        others_tokens: seen by everybody else so far, and by earlier processes of this learner.
        stopped: why the run is over, if it is: drain and leave.
    """

    others_tokens: Count
    stopped: Text | None = None


class Active(Tagged, frozen=True):
    """You take part, of which this is the proof (`protocol/syncer/proofs.py`); step on."""

    announcements: Items[Announce]
    run: RunIs = RunIs(0)
    proof: Text = ""


class Rejected(Tagged, frozen=True):
    """You cannot join."""

    error: Literal["join", "config", "plan", "fenced"]
    text: str


class Contributor(Value, frozen=True):
    """Names one contribution."""

    learner: LearnerId
    incarnation: Count
    seq: Count


class Commit(Tagged, frozen=True):
    """A new version of this fragment is durable; fetch it."""

    fragment: Count
    generation: Generation
    version: Count
    contributors: Items[Contributor]


class FateIs(Tagged, frozen=True):
    """What became of a contribution; `version` is set where it was merged."""

    fragment: Count
    seq: Count
    fate: Fate
    version: Count | None = None
    reason: Text | None = None


class Leases(Tagged, frozen=True):
    """What to train on.

    Args:
        leases: those that the question did not name.
        gone: those it named that are done, or somebody else's by now.
    """

    leases: OfLeases[Lease]
    gone: Annotated[tuple[Count, ...], Meta(max_length=2 * MAX_LEASES)] = ()


class LeaveNoted(Tagged, frozen=True):
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
    return codec.dump(message)


def decode(values: object, allowed: object) -> FromLearner | FromSyncer:
    """The inverse of `encode`.

    Args:
        values: a parsed JSON object.
        allowed: `FromLearner`, `FromSyncer`, or a union of some of them.

    Raises:
        CorruptMessageError: unknown kind, missing or unknown fields, a value of a wrong type, or one that no working
            peer would say.
    """
    if not isinstance(values, dict):
        raise CorruptMessageError(f"found a {type(values).__name__} where a message object is needed; nothing was used")
    kind = _KINDS.get(str(values.get("kind")))
    if kind is None or kind not in typing.get_args(allowed):
        raise CorruptMessageError(
            f"found message kind {values.get('kind')!r:.80}; allowed are "
            f"{', '.join(k.__name__ for k in typing.get_args(allowed))}; check that both sides run the same version"
        )
    message = typing.cast("FromLearner | FromSyncer", codec.load(kind, values))
    if problem := _contradiction(message):
        raise CorruptMessageError(f"{kind.__name__}: {problem}; nothing was used; do both sides run the same version?")
    return message


def _contradiction(message: FromLearner | FromSyncer) -> str | None:
    """Which of its fields cannot both be true, if any."""
    match message:
        case Ready(spans=spans) | AskRanges(begun=spans):
            return _not_trained(spans)
        case Leave(begun=spans, progress=progress):
            return _not_trained(spans) or _not_seen(progress)
        case Heartbeat(progress=progress):
            return _not_seen(progress)
    return None


def _not_trained(spans: tuple[Span, ...]) -> str | None:
    for span in spans:
        if span.start > span.stop or (span.start < span.stop and not span.samples):
            return f"{span.samples} samples as tokens [{span.start}, {span.stop}): tokens must come from samples"
    return None


def _not_seen(progress: Progress) -> str | None:
    for start, stop in (pair for ranges in progress.pending for pair in ranges):
        if not start <= stop <= progress.tokens:
            return f"pending range [{start}, {stop}) of {progress.tokens} tokens: must lie in them"
    return None


class News(Value, frozen=True):
    """What a learner hears of the run with every answer of the syncer.

    Args:
        num_learners: that take part now.
        fleet_tokens: seen by all learners so far; the x-axis of every curve.
        cosine: between this learner's last merged contribution and the outer gradient it became part of.
    """

    num_learners: Count | None = None
    fleet_tokens: Finite | None = None
    cosine: Finite | None = None
