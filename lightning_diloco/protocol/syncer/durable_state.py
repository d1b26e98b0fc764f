"""The part of the syncer's state that survives a restart.

1. Only `apply` changes this state, live and at a restart. Applying a record again changes nothing.
2. `restore(saved)` followed by the later records gives the same state as all records from the first.
3. The rest of the state (live learners, open rounds, payloads, times) is rebuilt when learners report back.

Source: our choice, after write-ahead logs.
"""

from __future__ import annotations

from typing import cast

from lightning_diloco.config import RunConfig
from lightning_diloco.protocol.codec import Json
from lightning_diloco.protocol.limits import Scalar
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.lease_table import LeaseTable
from lightning_diloco.protocol.syncer.ledger import Account, Ledger
from lightning_diloco.protocol.syncer.roster import Member, Roster
from lightning_diloco.protocol.syncer.round import Counts
from lightning_diloco.protocol.syncer.rounds import Rounds


class DurableState:
    """Manifest, sessions, versions, fates, token accounts and data leases of a run.

    Args:
        run: run id.
        options: run options fixed by the syncer's own flags.
        heartbeat_s: seconds between learners' heartbeats.
        secret: secret of a new run (`proofs.py`); "" disables proofs.
    """

    def __init__(self, *, run: str, options: dict[str, Scalar], heartbeat_s: float, secret: str = "") -> None:
        self.run = run
        self.secret = secret
        self.options = options
        self.heartbeat_s = heartbeat_s
        self.roster = Roster()
        self.manifest: Json | None = None
        self.config = RunConfig.with_defaults(options)  # until there is a manifest
        self.ledger = Ledger(0)
        self.leases = LeaseTable(self._books)
        self.rounds = Rounds(self.config, 0, self.roster, self.ledger, heartbeat_s=heartbeat_s)
        self.num_joins = 0
        self.num_lapses = 0
        self.num_inexact = 0
        self.stopped: str | None = None
        self._lease = 0

    def account(self, member: Member) -> Account:
        """Return the token account of a session."""
        return self.ledger.account(member.learner, member.incarnation)

    def _books(self, session: str) -> Account:
        return self.account(self.roster[session])

    def apply(self, record: records.LogRecord) -> None:
        """Apply a record to durable state."""
        match record:
            case records.Seeding():
                self._lease = max(self._lease, record.lease)
            case records.Seeded():
                self._apply_seeded(record)
            case records.Granted():
                if record.session not in self.roster.members:
                    self._apply_granted(record)
            case records.Forgotten():
                self.roster.members.pop(record.session, None)
            case records.Activated():
                if self.roster[record.session].state in ("joining", "confirmed"):
                    self._apply_activated(record)
            case records.CommitRecord():
                if record.version > self.rounds.fragments[record.fragment].version:
                    self.rounds.apply_commit(record)
                    self._follow(record)
            case records.Decided():
                self.rounds.contributions.apply_decided(record)
            case records.Quarantined() | records.Released():
                self.rounds.conduct.apply(record)
            case records.Lapsed():
                if not self.roster[record.session].is_lapsed:
                    self._apply_lapsed(record)
            case records.Returned():
                self._apply_returned(record)
            case records.Departed():
                if self.roster[record.session].state != "left":
                    self._apply_departed(record)
            case records.Regenerated():
                self.rounds.generation = record.generation
            case records.Stopped():
                self.stopped = self.stopped or record.reason
            case _:
                self.leases.apply(record)

    def _follow(self, commit: records.CommitRecord) -> None:
        """Update the data leases after a commit."""
        for merge in commit.merges:
            self.leases.follow(merge.session, merge.ready)

    def _apply_seeded(self, record: records.Seeded) -> None:
        if self.manifest is not None:
            return
        self.secret = record.secret
        self._take_manifest(record.lease, record.manifest, Ledger(cast("int", record.manifest["num_fragments"])))

    def _take_manifest(self, lease: int, manifest: Json, ledger: Ledger) -> None:
        self.manifest, self._lease, self.ledger = manifest, lease, ledger
        self.config = RunConfig.from_dict(cast("dict[str, object]", manifest["config"]))
        self.rounds = Rounds(self.config, ledger.num_fragments, self.roster, self.ledger, heartbeat_s=self.heartbeat_s)

    def _apply_granted(self, record: records.Granted) -> None:
        self.roster.members[record.session] = Member(record.session, record.learner, record.incarnation, record.slot)

    def _apply_activated(self, record: records.Activated) -> None:
        member = self.roster[record.session]
        for old in self.roster.older(member):
            if old.state == "active":
                account = self.account(old)
                if record.replaced is not None:
                    account.hear(record.replaced)
                account.close("lapsed")
            old.state = "fenced"
        member.state = "active"
        self.num_joins += 1
        self.account(member)

    def _apply_lapsed(self, record: records.Lapsed) -> None:
        member = self.roster[record.session]
        member.is_lapsed = True
        account = self.account(member)
        account.hear(record.heard)
        account.is_absent = True
        self.num_lapses += 1

    def _apply_returned(self, record: records.Returned) -> None:
        member = self.roster[record.session]
        member.is_lapsed = self.account(member).is_absent = False

    def _apply_departed(self, record: records.Departed) -> None:
        member = self.roster[record.session]
        account = self.account(member)
        if not account.declare(record.progress):
            self.num_inexact += 1
        account.close("undrained")
        member.state, member.ending, member.tokens = "left", record.reason, record.progress.tokens
        member.step = record.progress.step

    # ------------------------------------------------------------------------------------------------------ snapshots

    def saved(self) -> records.SavedState:
        """Return all durable state, for a snapshot."""
        return records.SavedState(
            run=self.run,
            manifest=self.manifest,
            lease=self._lease,
            generation=self.rounds.generation,
            next_round=self.rounds.next_round,
            versions=tuple(f.version for f in self.rounds.fragments),
            sessions=tuple(_saved_session(m) for m in self.roster.members.values()),
            accounts=self.ledger.saved(),
            num_joins=self.num_joins,
            num_lapses=self.num_lapses,
            num_commits=self.rounds.counts.num_commits,
            num_contributors=self.rounds.counts.num_contributors,
            num_stepping=self.rounds.counts.num_stepping,
            leases=self.leases.saved(),
            stopped=self.stopped,
            quarantined=dict(self.roster.quarantined),
            secret=self.secret,
            digests=tuple({str(v): digest for v, digest in f.digests.items()} for f in self.rounds.fragments),
        )

    def restore(self, saved: records.SavedState, now_s: float) -> None:
        """Restore the state that `saved` returned, into a new machine."""
        self.run, self._lease, self.secret = saved.run, saved.lease, saved.secret
        if saved.manifest is not None:
            self._take_manifest(saved.lease, saved.manifest, Ledger(len(saved.versions), saved.accounts))
        self.rounds.generation, self.rounds.next_round = saved.generation, saved.next_round
        for f, version in zip(self.rounds.fragments, saved.versions, strict=True):
            f.version = version
        for f, digests in zip(self.rounds.fragments, saved.digests, strict=False):  # older snapshots have none
            f.digests = {int(v): digest for v, digest in digests.items()}
        for s in saved.sessions:
            self.roster.members[s.session] = _member(s, now_s)
        self.leases = LeaseTable(self._books, saved.leases)
        self.roster.quarantined.update(saved.quarantined)
        self.num_joins, self.num_lapses, self.stopped = saved.num_joins, saved.num_lapses, saved.stopped
        self.rounds.counts = Counts(saved.num_commits, 0, saved.num_contributors, saved.num_stepping)


def _saved_session(m: Member) -> records.SavedSession:
    return records.SavedSession(
        session=m.session,
        learner=m.learner,
        incarnation=m.incarnation,
        slot=m.slot,
        state="joining" if m.state == "confirmed" else m.state,  # it confirms again
        ending=m.ending,
        is_lapsed=m.is_lapsed,
        step=m.step if m.state == "left" else 0,
        tokens=m.tokens if m.state == "left" else 0,
        fates={str(p): fate for p, fate in m.fates.items()},
        num_refused=m.num_refused,
        num_clipped=m.num_clipped,
    )


def _member(s: records.SavedSession, now_s: float) -> Member:
    member = Member(s.session, s.learner, s.incarnation, s.slot, state=s.state, is_lapsed=s.is_lapsed, ending=s.ending)
    member.step, member.tokens, member.heard_s = s.step, s.tokens, now_s
    member.num_refused, member.num_clipped = s.num_refused, s.num_clipped
    member.fates = {int(p): fate for p, fate in s.fates.items()}
    member.last_seq = {p: seq for p, (seq, *_) in member.fates.items()}
    return member
