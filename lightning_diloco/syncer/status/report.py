"""Figures of a run: the status while it runs, and `summary.json` at its end.

Each figure is defined once: here, in `protocol/syncer/ledger.py` (tokens) or in `learner/step_timer.py` (stall, rate).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_diloco.protocol.metric_names import COUNTS_TOKENS, STALL, TRAINER_STEP
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.protocol.syncer.roster import Member
from lightning_diloco.syncer.status import waiting
from lightning_diloco.transport.base import Json

GONE_S = 600.0


Pauses = Sequence[tuple[float, float]]


def summary(
    state: SyncerState,
    *,
    status: str,
    wall_s: float,
    now_s: float,
    bytes_up: int,
    bytes_down: int,
    pauses: Pauses = (),
) -> Json:
    """Return the content of summary.json; ledger figures are integers, in token x fragment."""
    totals = state.ledger.totals()
    num_fragments = max(1, state.ledger.num_fragments)
    config = state.config.to_dict()
    return {
        "run": state.run,
        "status": status,
        "stopped": state.stopped,
        "wall_s": round(wall_s, 3),
        "paused_s": round(sum(to_s - from_s for from_s, to_s in pauses), 3),
        "fleet_tokens": totals.seen / num_fragments,
        "tokens_seen": totals.seen,
        "tokens_merged": totals.merged,
        "tokens_discarded": dict(totals.discarded),
        "tokens_pending": totals.pending,
        "tokens_repeated": state.leases.num_repeated,
        "ledger_exact": totals.is_exact and state.num_inexact == 0,
        "goodput": goodput(state, now_s),
        "goodput_unpaused": goodput(state, now_s, pauses),
        "ranges_done": state.leases.num_done,
        "rounds": state.rounds.counts.num_commits,
        "rounds_aborted": state.rounds.counts.num_aborted,
        "participation": state.rounds.counts.participation,
        "joins": state.num_joins,
        "lapses": state.num_lapses,
        "bytes_up": bytes_up,
        "bytes_down": bytes_down,
        "stall_s": {m.learner: m.metrics.get(STALL) for m in _took_part(state)},
        "learners": [_learner(state, m, now_s) for m in _took_part(state)],
        "versions": [f.version for f in state.rounds.fragments],
        "eval_loss": state.eval_loss,
        "eval_reason": state.eval_reason,
        "token_unit": _token_unit(state),
        "config": config,
    }


def status(
    state: SyncerState,
    *,
    disk: tuple[str, float] | None,
    standby: Json | None = None,
    shards: Sequence[Json] = (),
    end_s: float | None = None,
    uptime_s: float,
    now_s: float,
    bytes_up: int,
    bytes_down: int,
    pauses: Pauses = (),
) -> Json:
    """Return the current status; see `waiting.waits` for `disk`, `standby`, `shards` and `end_s`."""
    totals = state.ledger.totals()
    rounds = [_round(state, p, now_s) for p, f in enumerate(state.rounds.fragments) if f.round is not None]
    return {
        "run": state.run,
        "state": "suspended" if disk is not None else _stage(state, since_s=now_s - uptime_s),
        "reason": None if disk is None else disk[0],
        "uptime_s": uptime_s,
        "config": state.config.to_dict(),
        "learners": [_learner(state, m, now_s) for m in _present(state, now_s, since_s=now_s - uptime_s)],
        "versions": [f.version for f in state.rounds.fragments],
        "rounds": rounds,
        "waits": waiting.waits(state, rounds, disk=disk, standby=standby, shards=shards, end_s=end_s, now_s=now_s),
        "standby": standby,
        "shards": list(shards),
        "num_commits": state.rounds.counts.num_commits,
        "effective_quorum": max(1, min(state.config.quorum, len(state.roster.electorate(now_s, state.heartbeat_s)))),
        "participation": state.rounds.counts.participation,
        "goodput": goodput(state, now_s),
        "goodput_unpaused": goodput(state, now_s, pauses),
        "fleet_tokens": totals.seen / max(1, state.ledger.num_fragments),
        "ledger": {
            "seen": totals.seen,
            "merged": totals.merged,
            "discarded": dict(totals.discarded),
            "pending": totals.pending,
            "repeated": state.leases.num_repeated,
        },
        "bytes_up": bytes_up,
        "bytes_down": bytes_down,
    }


def goodput(state: SyncerState, now_s: float, pauses: Pauses = ()) -> float | None:
    """Return merged tokens divided by the tokens that the planned learners would have trained without disturbance.

    A learner's planned time runs from its first start to its announced leave, including downtime, without `pauses`. Its
    undisturbed rate is the median that it measured itself; its incarnations are weighted by their tokens. None before
    a rate is measured, and if the tape has no start time of a learner (`history.py`).
    """
    accounts = state.ledger.accounts
    if any(m.active_s is None and (m.learner, m.incarnation) in accounts for m in _took_part(state)):
        return None
    capacity = 0.0
    by_learner: dict[str, list[Member]] = {}
    for member in _took_part(state):
        by_learner.setdefault(member.learner, []).append(member)
    for members in by_learner.values():
        starts = [m.active_s for m in members if m.active_s is not None]
        trained = [
            (accounts[key].seen, m.tokens_per_s) for m in members if (key := (m.learner, m.incarnation)) in accounts
        ]
        undisturbed_s = sum(tokens / rate for tokens, rate in trained if rate > 0)
        if starts and undisturbed_s:
            ends = [m.ended_s if m.ended_s is not None else now_s for m in members]
            rate = sum(tokens for tokens, rate in trained if rate > 0) / undisturbed_s
            began_s, ended_s = min(starts), max(ends)
            idle_s = sum(max(0.0, min(ended_s, to_s) - max(began_s, from_s)) for from_s, to_s in pauses)
            capacity += (ended_s - began_s - idle_s) * rate
    merged = state.ledger.num_merged / max(1, state.ledger.num_fragments)
    return merged / capacity if capacity > 0 else None


def _token_unit(state: SyncerState) -> str | None:
    """Return the unit that the learners count in; None before their first step."""
    told = [m.metrics[COUNTS_TOKENS] for m in _took_part(state) if COUNTS_TOKENS in m.metrics]
    return ("tokens" if max(told) else "samples") if told else None


def _took_part(state: SyncerState) -> list[Member]:
    return state.roster.in_state("active", "left", "fenced")


def _present(state: SyncerState, now_s: float, *, since_s: float) -> list[Member]:
    """Return, sorted by learner id, the newest session that took part, and any newer session that is joining.

    A silent joining session is shown for `lease_s`. A session that left or lapsed is shown for GONE_S. Learners that
    left before this syncer started (`since_s`) are not shown.
    """
    newest: dict[tuple[str, bool], Member] = {}
    for member in sorted(state.roster.members.values(), key=lambda m: m.incarnation):
        is_joining = member.state in ("joining", "confirmed")
        newest[member.learner, is_joining] = member
        if not is_joining:
            newest.pop((member.learner, True), None)
    return [newest[key] for key in sorted(newest) if _is_seen(state, newest[key], now_s, since_s)]


def _is_seen(state: SyncerState, m: Member, now_s: float, since_s: float) -> bool:
    silent_s = now_s - m.heard_s
    if m.state in ("joining", "confirmed"):
        return silent_s <= state.config.lease_s
    if m.state == "left":
        return now_s - GONE_S <= (m.ended_s or 0.0) >= since_s
    return m.is_live or silent_s <= GONE_S


def _stage(state: SyncerState, *, since_s: float) -> str:
    """Return the state of the run; "idle" if it finished before this syncer started and may be continued."""
    if state.manifest is None:
        return "seeding" if state.roster.members else "waiting"
    if state.is_finished and state.ended_by_finishing:
        last_s = max(m.ended_s or 0.0 for m in state.roster.in_state("left"))
        return "finished" if last_s >= since_s else "idle"
    return "idle" if state.is_finished and not state.roster.in_state("active") else "open"


def _phase(state: SyncerState, m: Member, now_s: float) -> str:
    if m.state in ("joining", "confirmed"):
        return "joining"
    if m.state == "left":
        return "left"
    if m.is_lapsed or m.state == "fenced":
        return "lapsed"
    return "stalled" if m.step > 0 and m.is_stalled(now_s, state.heartbeat_s) else m.phase


def _learner(state: SyncerState, m: Member, now_s: float) -> dict[str, Any]:
    versions = [f.version for f in state.rounds.fragments]
    behind = max((new - old for new, old in zip(versions, m.landed, strict=False)), default=0)
    return {
        "id": m.learner,
        "incarnation": m.incarnation,
        "where": m.where,
        "site": m.site,
        "phase": _phase(state, m, now_s),
        "step": m.step,
        "trainer_step": int(m.metrics.get(TRAINER_STEP, m.step)),
        "tokens": m.tokens,
        "metrics": dict(m.metrics),
        "tokens_per_s": m.tokens_per_s,
        "staleness_versions": behind,
        "num_refused": m.num_refused,
        "num_clipped": m.num_clipped,
        "quarantined": state.roster.quarantined.get(m.learner),
        "last_contribution_s_ago": None if m.contributed_s is None else now_s - m.contributed_s,
        "last_heard_s_ago": now_s - m.heard_s,
    }


def _round(state: SyncerState, p: int, now_s: float) -> Json:
    f = state.rounds.fragments[p]
    r = f.round
    assert r is not None
    whom, closes_in_s, then = waiting.end_of_stage(state, p, now_s)
    return {
        "fragment": p,
        "round": r.number,
        "stage": r.stage,
        "opened_s_ago": now_s - r.opened_s,
        "ready": _names(state, sorted(f.held)),
        "waiting_for": _names(state, whom),
        "quorum": state.rounds.effective_quorum(r),
        "closes_in_s": closes_in_s,
        "then": then,
    }


def _names(state: SyncerState, awaited: Iterable[str]) -> list[str]:
    """Return the learner ids of sessions; other names (the disk, the merge) stay as they are."""
    members: Mapping[str, Member] = state.roster.members
    return [members[name].learner if name in members else name for name in awaited]
