"""The messages between learners and the syncer on the control connection.

1. Every message is a frozen value. `encode` converts it to a JSON object, and `decode` converts it back. `decode`
   accepts only exact fields of exact types within their bounds (`limits.py`), so the machines need no further checks.
2. Token counts are integers on one learner's own counter. `start` and `stop` are the half-open range of tokens in a
   contribution. `steps` counts inner steps.
3. Messages hold no tensors. Tensors travel on the bulk connection, with a `Ready` in the header as their description.
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
    """A version of one fragment at a learner, with the proof that it was published (`protocol/syncer/proofs.py`)."""

    generation: Generation
    version: Count
    digest: Text
    proof: Text = ""


# ---------------------------------------------------------------------------------------------- learner -> syncer


class Hello(Tagged, frozen=True):
    """Ask to join the run, or report that a process that took part before has reconnected.

    Args:
        learner: learner id.
        connection: number of this connection of the process; messages of lower ones are ignored.
        protocol: version of these messages.
        options: run options that this learner sets explicitly.
        run: run id that the learner expects; None: any.
        known: one mark per fragment if the process has adopted the anchors; empty otherwise.
        where: host and process id, shown to users.
        site: site of its machine, shown to users; "": not given.
        proof: proof from `Active` that the process takes part.
    """

    learner: LearnerId
    connection: Count
    protocol: Count
    options: Options
    run: Text | None = None
    known: Items[Mark] = ()
    where: Text = ""
    site: Text = ""
    proof: Text = ""


class SeedPlan(Tagged, frozen=True):
    """Send the seeder's manifest. The values of all fragments follow on the bulk connection."""

    lease: Count
    manifest: Json


class Confirm(Tagged, frozen=True):
    """Report that this process has adopted every anchor and is ready to step."""

    incarnation: Count
    plan_digest: Text
    frozen: Named
    token_unit: Text | None


class Intent(Tagged, frozen=True):
    """Report that this fragment is due at the sender, one step ahead.

    Args:
        step_s: the sender's usual time per step.
        patience_s: how long a draining sender can wait for learners that evaluate, so that one round merges the
            contributions of all.
        long_step_s: time of the sender's long steps; 0: not known.
    """

    fragment: Count
    step_s: StepTime
    patience_s: Rate = 0.0
    long_step_s: StepTime = 0.0

    @property
    def boundary_s(self) -> float:
        """Time within which the sender nearly always reaches its next step boundary."""
        return max(self.step_s, self.long_step_s)


class Ready(Tagged, frozen=True):
    """Report that a snapshot was taken. Its payload follows on the bulk connection.

    Args:
        spans: the leases on which any of these tokens were trained.
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
        """Return the end of the merged part of the range if this part of the values (0..1) was merged."""
        return self.start + int(self.tokens * kept)


class Decline(Tagged, frozen=True):
    """Report that this learner contributes nothing to this round."""

    fragment: Count
    round: Count


class Progress(Value, frozen=True):
    """A learner's progress report.

    Args:
        step: inner steps completed.
        tokens: the learner's token counter.
        landed: per fragment, the version that has landed.
        pending: per fragment, the ranges [start, stop) of the counter that are neither landed as merged nor discarded.
        discarded: token x fragment dropped by this learner, by cause.
        generation: generation of the anchors that the report refers to.
    """

    step: Count
    tokens: Count
    landed: Items[Count]
    pending: Items[Pending]
    discarded: Causes = field(default_factory=dict)
    generation: Generation = 0


class Heartbeat(Tagged, frozen=True):
    """Report that this learner is alive, about once a second. `stop` is the reason to end the whole run, if any."""

    phase: Phase
    progress: Progress
    step_s: StepTime
    tokens_per_s: Rate
    metrics: Metrics = field(default_factory=dict)
    stop: Text | None = None


class AskRanges(Tagged, frozen=True):
    """Ask for data leases ahead of need, and report the progress in the present ones. The learner repeats it.

    Args:
        generation: generation of the learner's anchors.
        catalogue: the data that the learner reads.
        wanted: number of further leases that it asks for.
        drops: its landing rule drops tokens.
        begun: progress in each lease that it has begun and that the syncer has not yet reported as gone.
        unread: numbers of its other leases.
    """

    generation: Generation
    catalogue: Catalogue
    wanted: Count
    drops: bool
    begun: OfLeases[Span]
    unread: OfLeases[Count]


class AskFate(Tagged, frozen=True):
    """Ask for the fate of a contribution."""

    fragment: Count
    seq: Count


class Leave(Tagged, frozen=True):
    """Leave the run. The learner repeats this until it is acknowledged. `stop` is as in a heartbeat."""

    reason: Reason
    progress: Progress
    tokens_per_s: Rate
    metrics: Metrics = field(default_factory=dict)
    begun: OfLeases[Span] = ()
    stop: Text | None = None


class Evaluated(Tagged, frozen=True):
    """The final anchor's loss, from the last learner that leaves; None with a reason if it was not evaluated."""

    eval_loss: Finite | None
    reason: Text | None = None


# ---------------------------------------------------------------------------------------------- syncer -> learner


class SeedGrant(Tagged, frozen=True):
    """Ask a learner for its values, because the run is empty. They become version 0."""

    lease: Count
    incarnation: Count
    run: Text
    options: Options


class Welcome(Tagged, frozen=True):
    """Ask a learner to adopt these versions and then to confirm.

    Args:
        slot: the learner's number in the run; a restart does not change it.
        merged: per fragment, the merged tokens of this process; empty if it has not taken part yet.
    """

    incarnation: Count
    run: Text
    manifest: Json
    generations: Items[Generation]
    versions: Items[Count]
    slot: Count
    merged: Items[Count] = ()


class Announce(Tagged, frozen=True):
    """Ask a learner for a snapshot of this fragment at its next step boundary, because a round is open."""

    fragment: Count
    round: Count


class RunIs(Tagged, frozen=True):
    """State of the whole run, the answer to every heartbeat.

    Args:
        others_tokens: tokens seen so far by all other learners and by earlier processes of this learner.
        stopped: why the run was ended, if it was; the learner then drains and leaves.
    """

    others_tokens: Count
    stopped: Text | None = None


class Active(Tagged, frozen=True):
    """Tell a learner that it takes part and may step. `proof` proves it later (`protocol/syncer/proofs.py`)."""

    announcements: Items[Announce]
    run: RunIs = RunIs(0)
    proof: Text = ""


class Rejected(Tagged, frozen=True):
    """Tell a learner why it cannot take part."""

    error: Literal["join", "config", "plan", "fenced"]
    text: str


class Contributor(Value, frozen=True):
    """The identity of one contribution."""

    learner: LearnerId
    incarnation: Count
    seq: Count


class Commit(Tagged, frozen=True):
    """Announce that a new version of this fragment is durable and can be fetched."""

    fragment: Count
    generation: Generation
    version: Count
    contributors: Items[Contributor]


class FateIs(Tagged, frozen=True):
    """The fate of a contribution. `version` is set if it was merged."""

    fragment: Count
    seq: Count
    fate: Fate
    version: Count | None = None
    reason: Text | None = None


class Leases(Tagged, frozen=True):
    """The answer to `AskRanges`.

    Args:
        leases: the learner's leases that the request did not name.
        gone: numbers in the request that are no longer leases of this learner, because they are done or were given
            back.
    """

    leases: OfLeases[Lease]
    gone: Annotated[tuple[Count, ...], Meta(max_length=2 * MAX_LEASES)] = ()


class LeaveNoted(Tagged, frozen=True):
    """Acknowledge a leave. The last learner that leaves (`is_last`) evaluates the final anchor."""

    is_last: bool


FromLearner = (
    Hello | SeedPlan | Confirm | Intent | Ready | Decline | Heartbeat | AskRanges | AskFate | Leave | Evaluated
)
FromSyncer = SeedGrant | Welcome | Announce | Active | RunIs | Rejected | Commit | FateIs | Leases | LeaveNoted

_KINDS: dict[str, type] = {
    kind.__name__: kind for union in (FromLearner, FromSyncer) for kind in typing.get_args(union)
}


def encode(message: FromLearner | FromSyncer) -> Json:
    """Return a message as a JSON object, with its class name under "kind"."""
    return codec.dump(message)


def decode(values: object, allowed: object) -> FromLearner | FromSyncer:
    """Return the message of a JSON object; the inverse of `encode`.

    Args:
        values: a parsed JSON object.
        allowed: `FromLearner`, `FromSyncer`, or a union of some of their messages.

    Raises:
        CorruptMessageError: unknown kind, missing or unknown fields, a value of a wrong type or out of bounds, or
            fields that contradict each other.
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
    """Return which fields of a message contradict each other; None if none do."""
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
    """Facts about the run in every answer of the syncer.

    Args:
        num_learners: number of learners that take part now.
        fleet_tokens: tokens seen by all learners so far; the x-axis of every curve.
        cosine: cosine of this learner's last merged contribution and the outer gradient of its round.
        standby: `host:port` of the syncer's standby; None: there is none.
        shards: `host:port` of shards 1, 2, ... of the run; without a host, it is the syncer's.
    """

    num_learners: Count | None = None
    fleet_tokens: Finite | None = None
    cosine: Finite | None = None
    standby: Text | None = None
    shards: Items[Text] = ()
