"""Invariants of every history, computed from the log and from the tokens that learners have really trained.

1. Versions only grow and the generation stays, unless the disk is rolled back. A takeover by the standby does not count
   as a rollback.
2. No round closes below the effective quorum. No two processes of one learner take part.
3. Under "carry", parameters minus anchor equal the pending tokens. Every learner's anchor equals the published one.
4. An anchor is the sum of the tokens merged into it. No token is merged twice, and contributions of a fragment are
   merged in the order in which a process made them, none after the process has left or was replaced.
5. The syncer's accounts agree with each learner and with the log, and seen = merged + discarded + pending.
6. A restart from disk restores the durable part of the live state machine.
7. Every range of the data is merged once per epoch (`exactly_once.py`).
8. At a boundary, a learner with several ranks lands exactly the updates that it promised when the step began, and takes
   only snapshots that it promised. Between boundaries it does neither.
9. While no message is lost, the lease of a learner that is connected does not run out.

The checks do not use the arithmetic of the ledger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

from msgspec.structs import replace

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol.data_ranges import Holding, Span
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.simulate import exactly_once
from lightning_diloco.simulate.learner import SimulatedLearner
from lightning_diloco.simulate.observed import Observed

Merges = dict[tuple[str, int, int], list[tuple[int, int]]]


class Invariants:
    """The checks of one fleet; a violation raises AssertionError with the last events before it."""

    def __init__(self, fleet: Observed) -> None:
        self._fleet = fleet
        self._versions: list[int] = []
        self._generation = 0
        self._was_rolled_back = False
        self._closed: set[int] = set()
        self._lapsed: set[str] | None = set()
        self.num_checks = 0

    def _fail(self, text: str) -> NoReturn:
        raise AssertionError(f"{text}\n{self._fleet.story()}")

    def rolled_back(self) -> None:
        """Allow lower versions once, and new generations, after the disk was rolled back."""
        self._versions = []
        self._was_rolled_back = True
        self._lapsed = None

    # ------------------------------------------------------------------------------------------------ after every event

    def after_syncer_event(self) -> None:
        syncer = self._fleet.syncer.state
        self.num_checks += 1
        versions = [f.version for f in syncer.rounds.fragments]
        if any(new < old for new, old in zip(versions, self._versions, strict=False)):
            self._fail(f"versions went from {self._versions} to {versions}")
        self._versions = versions
        if syncer.rounds.generation != self._generation and not self._was_rolled_back:
            self._fail(f"generation {syncer.rounds.generation} began, although no disk has lost records")
        self._generation = syncer.rounds.generation
        active = [member.learner for member in syncer.roster.members.values() if member.state == "active"]
        if len(set(active)) < len(active):
            self._fail(f"two processes of one learner take part: {sorted(active)}")
        self._check_lapses()
        if syncer.num_inexact:
            self._fail("a learner's books disagree with the commits it has landed")
        for f in syncer.rounds.fragments:
            r = f.round
            if r is None or r.stage == "collecting" or r.number in self._closed:
                continue
            self._closed.add(r.number)
            quorum = max(1, min(self._fleet.config.quorum, len(r.electorate)))
            if r.num_ready < quorum:
                self._fail(f"round {r.number} closed with {r.num_ready} contributions, the quorum is {quorum}")

    def _check_lapses(self) -> None:
        members = self._fleet.syncer.state.roster.members.values()
        lapsed = {member.session for member in members if member.is_lapsed}
        if self._lapsed is not None and self._fleet.network.loss == 0:
            for learner in (self._fleet.learners[session] for session in lapsed - self._lapsed):
                for_s = self._fleet.syncer.event_came_s - learner.connected_s  # leases are measured from arrival
                if not learner.is_gone and not learner.is_cut and for_s > self._fleet.config.lease_s:
                    self._fail(f"the lease of {learner.session} ran out, although it was connected for {for_s:.1f} s")
        self._lapsed = lapsed

    def after_learner_event(
        self, learner: SimulatedLearner, event: on.LearnerEvent, todo: Sequence[do.LearnerAction]
    ) -> None:
        state = learner.state
        assert state is not None
        if learner.pace.has_ranks:
            self._check_promise(learner, event, todo)
        for p, f in enumerate(state.fragments):
            if f.must_adopt is not None:
                continue
            published = self._fleet.syncer.disk.anchors[p]
            is_current = (
                f.landed < len(published) and learner.digests[p] == self._fleet.syncer.disk.digests[p][f.landed]
            )
            if is_current and learner.anchors[p] != published[f.landed]:
                self._fail(f"{learner.session} has {learner.anchors[p]} as version {f.landed} of fragment {p}")
            pending = sum(stop - start for start, stop in f.pending(state.tokens))
            if learner.pace.align == "carry" and learner.params[p] - learner.anchors[p] != pending:
                self._fail(
                    f"{learner.session} holds {learner.params[p] - learner.anchors[p]} tokens of progress in fragment "
                    f"{p}, {pending} are pending"
                )

    def _check_promise(
        self, learner: SimulatedLearner, event: on.LearnerEvent, todo: Sequence[do.LearnerAction]
    ) -> None:
        landed = tuple(action.fragment for action in todo if isinstance(action, do.Land))
        copied = {action.ready.fragment for action in todo if isinstance(action, do.Snapshot)}
        is_boundary = isinstance(event, on.StepDone | on.Pause | on.Finish)
        promised = learner.promise if is_boundary else do.Promise((), ())
        if landed != promised.land or not copied <= set(promised.snapshot):
            self._fail(f"{learner.session} landed {landed} and copied {copied}; it has promised {promised}")

    # ---------------------------------------------------------------------------------------------------- on demand

    def audit(self) -> None:
        """Run the slow checks: the whole log, the accounts and a restart."""
        merges = self._merges()
        self._check_anchors(merges)
        self._check_books(merges)
        if found := exactly_once.violation(self._fleet):
            self._fail(found)
        for use_snapshot in (False, True):
            again = self._fleet.syncer.disk.recovered(expect=None, now_s=self._fleet.now_s, use_snapshot=use_snapshot)
            if (restarted := durable(again)) != (live := durable(self._fleet.syncer.state)):
                differing = {key: (live[key], restarted[key]) for key in live if live[key] != restarted[key]}
                self._fail(f"a restart (snapshot: {use_snapshot}) finds (live, restarted): {differing}")

    def _merges(self) -> Merges:
        """Return the merged token ranges per (learner, incarnation, fragment), from commit records alone."""
        who: dict[str, tuple[str, int]] = {}
        merges: Merges = defaultdict(list)
        seqs: dict[tuple[str, int], int] = defaultdict(int)
        ended = set[str]()
        for entry in self._fleet.syncer.disk.log:
            record = entry.record
            if isinstance(record, records.Granted):
                who[record.session] = record.learner, record.incarnation
            elif isinstance(record, records.Activated):
                learner, incarnation = who[record.session]
                ended |= {session for session, (name, n) in who.items() if name == learner and n < incarnation}
            elif isinstance(record, records.Departed):
                ended.add(record.session)
            elif isinstance(record, records.CommitRecord):
                for merge in record.merges:
                    learner, incarnation = who[merge.session]
                    merges[learner, incarnation, record.fragment].append((merge.ready.start, merge.stop))
                    if merge.session in ended:
                        self._fail(f"work of {merge.session} was merged after it had left or was replaced")
                    if (seq := merge.ready.seq) <= (last := seqs[merge.session, record.fragment]):
                        self._fail(f"{merge.session} had seq {seq} of fragment {record.fragment} merged after {last}")
                    seqs[merge.session, record.fragment] = seq
        for key, ranges in merges.items():
            ranges.sort()
            for (_, stop), (start, _) in pairwise(ranges):
                if start < stop:
                    self._fail(f"tokens of {key} from {start} on were merged twice")
        return merges

    def _check_anchors(self, merges: Merges) -> None:
        for p, values in enumerate(self._fleet.syncer.disk.anchors):
            merged = sum(stop - start for (_, _, q), ranges in merges.items() if q == p for start, stop in ranges)
            is_carry = all(learner.pace.align == "carry" for learner in self._fleet.learners.values())
            if is_carry and values[-1] != merged:
                self._fail(f"the anchor of fragment {p} holds {values[-1]} tokens, {merged} were merged")

    def _check_books(self, merges: Merges) -> None:
        ledger = self._fleet.syncer.state.ledger
        totals = ledger.totals()
        merged = sum(stop - start for ranges in merges.values() for start, stop in ranges)
        if totals.merged != merged:
            self._fail(f"the ledger says {totals.merged} tokens were merged, the log {merged}")
        discarded = sum(totals.discarded.values())
        if totals.seen != totals.merged + discarded + totals.pending:
            self._fail(f"the ledger does not balance: {totals}")
        num_fragments = len(self._fleet.syncer.disk.anchors)
        for session, learner in self._fleet.learners.items():
            member = self._fleet.syncer.state.roster.get(session)
            if learner.state is None or member is None:
                continue
            account = ledger.accounts.get((member.learner, member.incarnation))
            if account is not None and account.seen > learner.state.tokens:
                self._fail(f"{session} trained {learner.state.tokens} tokens, {account.seen} were seen")
            if account is not None and member.state == "left":
                trained = learner.state.tokens * num_fragments
                found = account.num_merged + sum(account.num_discarded.values()) + account.num_pending
                if trained != found:
                    self._fail(f"{session} trained {trained} tokens, {found} are booked")


def _ownership(holdings: tuple[Holding, ...]) -> tuple[Holding, ...]:
    """Return the holdings without the holders' progress, which learners report again after a restart."""
    bare = (replace(holding, span=Span(holding.lease.number, 0, 0, 0)) for holding in holdings)
    return tuple(sorted(bare, key=lambda holding: holding.lease.number))


def durable(state: SyncerState) -> dict[str, object]:
    """Return the state that a restart must restore, as comparable values."""
    saved = state.saved()
    ended = {(s.learner, s.incarnation) for s in saved.sessions if s.state in ("left", "fenced")}
    books = {(a.learner, a.incarnation): a for a in saved.accounts}
    return {
        "manifest": saved.manifest,
        "generation": saved.generation,
        "versions": saved.versions,
        "sessions": {s.session: s for s in saved.sessions},
        "counts": (saved.num_joins, saved.num_lapses, saved.num_commits, saved.num_contributors, saved.num_stepping),
        "merged": {who: account.merged for who, account in books.items() if any(account.merged)},
        "leases": replace(
            saved.leases, held=_ownership(saved.leases.held), pool=_ownership(saved.leases.pool), repeated=()
        ),
        "repeated": state.leases.num_repeated,
        "closed": {who: (a.seen, a.declared, a.booked) for who, a in books.items() if who in ended and a.is_closed},
    }
