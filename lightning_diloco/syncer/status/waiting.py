"""The waits of a run, for the status.

1. A wait has a subject (`what`), the learners or things that it waits for (`for`), its start and end in seconds from
   now (`since_s`, `until_s`), and a consequence of its end (`then`). A wait without a time limit has no `until_s`.
2. The list is ordered: the disk, the standby, the shards, the start, the rounds, the end. An earlier wait delays the
   later waits.
3. Learners keep training during these waits of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_diloco.protocol.syncer.joins import START_HOLD_S
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.protocol.syncer.roster import SILENT_HEARTBEATS, Member
from lightning_diloco.protocol.syncer.succession import ALONE_S
from lightning_diloco.transport.base import Json

LATE_S = 2.0  # more than a syncer takes to give its standby up

_THEN = {
    "transferring": "late contributions are held for the next round",
    "merging": "the outer gradient is written to disk",
    "committing": "the new version is offered to all learners",
    "suspended": "the commit is tried again",
}


def waits(
    state: SyncerState,
    rounds: list[Json],
    *,
    disk: tuple[str, float] | None,
    standby: Json | None = None,
    shards: Sequence[Json] = (),
    end_s: float | None,
    now_s: float,
) -> list[Json]:
    """Return all current waits.

    Args:
        state: the state machine.
        rounds: open rounds, as in the status.
        disk: (error, time since when) if the disk fails; None: it works.
        standby: the standby (`Replica.status`); None: there is none.
        shards: the shards (`RemoteShard.status`).
        end_s: when the run ends without the loss of the final anchor; None: it does not end then.
        now_s: current time on the clock of the state machine.
    """
    found = (
        [] if disk is None else [_wait(f"the disk: {disk[0]}", ["the disk"], now_s - disk[1], None, "commits continue")]
    )
    if standby is not None and standby["waits_s"] is not None:
        what, then = f"the standby at {standby['address']} to have the last decisions on disk", "commits continue"
        until_s: float | None = max(0.0, ALONE_S - standby["silent_s"])
        if standby["silent_s"] > ALONE_S + LATE_S:  # too few learners count (`protocol/syncer/succession.py`)
            until_s, then = None, "commits continue when it returns; if it is lost, restart with --take-over"
        found.append(_wait(what, ["the standby"], standby["waits_s"], until_s, then))
    found += [
        _wait("the fragments of a shard", [f"shard {shard['shard']}"], shard["away_s"], None, "their rounds continue")
        for shard in shards
        if shard["away_s"] is not None
    ]
    found += _start(state, now_s)
    found += [
        _wait(f"fragment {r['fragment']}, round {r['round']}, {r['stage']}", r["waiting_for"], r["opened_s_ago"],
              r["closes_in_s"], r["then"])
        for r in rounds
    ]  # fmt: skip
    return [*found, *_silent(state, now_s), *_quarantined(state), *_end(state, end_s, now_s)]


def end_of_stage(state: SyncerState, p: int, now_s: float) -> tuple[list[str], float | None, str]:
    """Return the subjects that an open round waits for, the seconds until its stage ends, and the consequence."""
    f = state.rounds.fragments[p]
    r = f.round
    assert r is not None
    if r.stage == "collecting":
        missing = r.electorate - f.held.keys()
        quorum = state.rounds.effective_quorum(r)
        if len(f.held) < quorum:
            left_s = max(0.0, r.answers_until_s - now_s)
            return (
                sorted(missing),
                left_s,
                f"the round closes with those that are ready, but at least one, if {quorum} are not ready in time",
            )
        until_s = max(r.until_s, state.rounds.waits_for_owed_until_s(r, missing))
        return sorted(missing), max(0.0, until_s - now_s), "the round closes with those that are ready"
    if r.stage == "transferring":
        late = [s for s in r.members if s in f.held and not f.held[s].has_payload]
        return late, max(0.0, r.until_s - now_s), _THEN[r.stage]
    thing = "the merge" if r.stage == "merging" else "the disk"
    return [thing], max(0.0, r.until_s - now_s) if r.stage == "suspended" else None, _THEN[r.stage]


def _wait(what: str, whom: list[str], since_s: float | None, until_s: float | None, then: str) -> Json:
    return {"what": what, "for": whom, "since_s": since_s, "until_s": until_s, "then": then}


def _start(state: SyncerState, now_s: float) -> Iterator[Json]:
    """Yield the wait of an empty run: for its start values, then for the expected learners."""
    seeder = state.seeder
    if state.manifest is None and seeder is None:
        yield _wait("the start", ["a first learner"], None, None, "its parameters become the anchors")
    elif state.manifest is None and seeder is not None:
        left_s = max(0.0, state.config.lease_s - (now_s - seeder.heard_s))
        then = "its parameters become the anchors; if it is silent, another learner's do"
        yield _wait("the start values", [seeder.learner], None, left_s, then)
    elif state.num_awaited:
        since_s = state.first_confirmed_s
        waited_s = None if since_s is None else now_s - since_s
        left_s = None if waited_s is None else max(0.0, START_HOLD_S - waited_s)
        coming = [m.learner for m in state.roster.in_state("joining")]
        whom = coming or [f"{state.num_awaited} more learners"]
        yield _wait(
            f"the first step, with {state.expect} learners", whom, waited_s, left_s, "the learners that are ready begin"
        )


def _silent(state: SyncerState, now_s: float) -> Iterator[Json]:
    for member in sorted(state.roster.in_state("active"), key=lambda m: m.learner):
        silent_s = now_s - member.heard_s
        if member.is_lapsed:
            then = "it continues, or a new process takes its place; rounds do not wait for it"
            yield _wait("the return of a learner that lapsed", [member.learner], silent_s, None, then)
        elif silent_s > SILENT_HEARTBEATS * state.heartbeat_s:
            left_s = max(0.0, state.config.lease_s - silent_s)
            yield _wait(
                "a message from a silent learner",
                [member.learner],
                silent_s,
                left_s,
                "it lapses: no round waits for it",
            )


def _quarantined(state: SyncerState) -> Iterator[Json]:
    for name in sorted({member.learner for member in state.roster.live()} & state.roster.quarantined.keys()):
        what = f"contributions that agree with the others' ({state.roster.quarantined[name]})"
        then = "its contributions are merged again; rounds do not wait for it"
        yield _wait(what, [name], None, None, then)


def _end(state: SyncerState, end_s: float | None, now_s: float) -> Iterator[Json]:
    """Yield the wait for the last learner to leave, which evaluates the final anchor."""
    if not (state.is_finished and state.ended_by_finishing) or state.has_verdict:
        return
    left = state.roster.in_state("left")
    last: Member | None = max(left, key=lambda m: m.ended_s or 0.0, default=None)
    if last is not None and last.ended_s is not None:
        left_s = None if end_s is None else max(0.0, end_s - now_s)
        then = "it is in the summary" if end_s is None else "the run ends without it"
        yield _wait("the loss of the final anchor", [last.learner], now_s - last.ended_s, left_s, then)
