"""The join of a process: hello, seed or adopt, confirm, active.

1. The same session always gets the same incarnation. A new incarnation becomes active, and fences off older ones, when
   its process confirms that it has adopted all anchors.
2. An empty run grants one seed lease; all other learners wait for the seed. The seed lease passes to another learner if
   the seeder is silent for `lease_s`, or if its start values are refused; in this case its session is forgotten.
3. The first step waits until the expected learners have confirmed, for at most START_HOLD_S. Later joins start at once.
4. Each message of a join may be lost or repeated; the answer is always the next message of the join.
5. At most MAX_JOINING processes join at the same time. A further one replaces the one that has been silent for longest,
   if that is longer than `lease_s`; otherwise it waits.

Source: our choice. The rules for refusing a join are in `admission.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.actions import SyncerAction
from lightning_diloco.protocol.codec import Json
from lightning_diloco.protocol.limits import Scalar
from lightning_diloco.protocol.syncer import admission, manifests, proofs, records
from lightning_diloco.protocol.syncer.leasing import Leasing
from lightning_diloco.protocol.syncer.roster import Member

START_HOLD_S = 60.0
MAX_JOINING = 256


class Joins(Leasing):
    """The part of the syncer that handles joins.

    Args:
        expect: number of learners to wait for before the first step; None: do not wait.
    """

    def __init__(
        self, *, run: str, options: dict[str, Scalar], expect: int | None, heartbeat_s: float, secret: str
    ) -> None:
        super().__init__(run=run, options=options, heartbeat_s=heartbeat_s, secret=secret)
        self.expect = expect
        self._now_s = 0.0
        self._seeder: str | None = None
        self._pending_manifest: Json | None = None
        self._has_started = expect is None
        self.first_confirmed_s: float | None = None
        self._contenders = admission.Contenders()
        self._outlived: int | None = None

    def _heard_from(self, member: Member, now_s: float) -> list[SyncerAction]:
        member.heard_s = now_s
        if not (member.is_lapsed and member.state == "active"):
            return []
        record = records.Returned(member.session)
        self.apply(record)
        return [do.Record(records.encode(record)), do.Note("return", {"learner": member.learner})]

    def _fenced(self, member: Member) -> SyncerAction:
        text = (
            f"incarnation {member.incarnation} of learner {member.learner!r} was replaced by a newer process; "
            "this one must stop. Give each process a learner id of its own."
        )
        return do.Send(member.session, msg.Rejected("fenced", text))

    @property
    def _fixed(self) -> dict[str, object]:
        """Run options that can no longer change."""
        if self.manifest is None:
            return dict(self.options)
        return cast("dict[str, object]", self.manifest["config"])

    @property
    def _reduced(self) -> dict[str, object]:
        """Options that the seeder asked for, if its model forced other values."""
        return cast("dict[str, object]", (self.manifest or {}).get("asked", {}))

    def _hello(self, session: str, member: Member | None, hello: msg.Hello, now_s: float) -> list[SyncerAction]:
        if member is None:
            return self._newcomer(session, hello, now_s)
        if hello.connection < member.connection:
            return []
        member.greet(hello)
        todo = self._heard_from(member, now_s)
        if member.state == "fenced":
            return [*todo, self._fenced(member)]
        if member.state == "left":
            return [*todo, do.Send(session, msg.LeaveNoted(self._is_last()))]
        if hello.known and self.manifest is None:
            return [*todo, self._unknown(session)]  # the whole run is lost
        was_forgotten = bool(hello.known) and member.state == "joining"
        if was_forgotten and not proofs.is_member(self.secret, session, hello.proof):
            return [*todo, self._unknown(session)]
        lost = self._lost(hello.known)
        if was_forgotten or any(proofs.is_proved(self.secret, p, mark) for p, mark in lost):
            proved = [mark for p, mark in enumerate(hello.known) if proofs.is_proved(self.secret, p, mark)]
            self._outlived = max((mark.generation for mark in proved), default=self.rounds.generation)
            if was_forgotten:  # it had confirmed, but that record is lost
                member.state = "confirmed"
                todo += self._activate(member, now_s)
            return todo  # the Welcome of the new generation follows
        if lost:
            return [*todo, self._unproved(session, *lost[0])]
        announcements = [do.Send(session, a) for a in self.rounds.announcements(session)]
        return todo + self._invite(member) + (announcements if member.state == "active" else [])

    def _newcomer(self, session: str, hello: msg.Hello, now_s: float) -> list[SyncerAction]:
        if hello.known:
            return [self._unknown(session)]
        if rejected := admission.objection(hello, self.run, self._fixed, self._reduced):
            return [do.Send(session, rejected), do.Note("rejected", {"learner": hello.learner, "text": rejected.text})]
        verdict = self._contenders.verdict(
            session, hello.learner, self.roster, now_s, heartbeat_s=self.heartbeat_s, lease_s=self.config.lease_s
        )
        if verdict == "wait":
            return []
        if verdict is not None:
            rejected = msg.Rejected("join", verdict)
            return [do.Send(session, rejected), do.Note("rejected", {"learner": hello.learner, "text": verdict})]
        todo = self._make_room(now_s)
        if todo is None:
            return []  # the process repeats its hello
        name, roster = hello.learner, self.roster
        parts = cast("int | None", self._fixed.get("data_parts")) or 1
        record = records.Granted(session, name, roster.next_incarnation(name), roster.slot_for(name, parts))
        self.apply(record)
        member = self.roster[session]
        member.greet(hello)
        member.heard_s = now_s
        return [*todo, do.Record(records.encode(record)), *self._invite(member)]

    def _make_room(self, now_s: float) -> list[SyncerAction] | None:
        """Make a place for one more joining process (rule 5); returns None if there is none."""
        joining = self.roster.in_state("joining", "confirmed")
        if len(joining) < MAX_JOINING:
            return []
        silent = min(joining, key=lambda m: m.heard_s)
        if now_s - silent.heard_s <= self.config.lease_s:
            return None
        record = records.Forgotten(silent.session)
        self.apply(record)
        if silent.session == self._seeder:
            self._seeder = self._pending_manifest = None
        return [do.Record(records.encode(record)), do.Note("forgotten", {"learner": silent.learner})]

    def _unproved(self, session: str, p: int, mark: msg.Mark) -> SyncerAction:
        text = (
            f"this process holds generation {mark.generation}, version {mark.version} of fragment {p}, which this "
            f"syncer does not know, and no proof that it was published; the newest is generation "
            f"{self.rounds.generation}, version {self.rounds.fragments[p].version}. Restart the learner; it continues "
            "from the syncer's anchors"
        )
        return do.Send(session, msg.Rejected("join", text))

    def _unknown(self, session: str) -> SyncerAction:
        text = (
            f"this process has taken part in run {self.run!r}, whose syncer does not know it: the run directory is "
            "empty, was rolled back, or belongs to another run. Restore the run directory, or restart the learner"
        )
        return do.Send(session, msg.Rejected("join", text))

    def _invite(self, member: Member) -> list[SyncerAction]:
        """Tell a session to adopt or to seed; while it must wait, it gets no answer."""
        if self.manifest is not None:
            versions = tuple(f.version for f in self.rounds.fragments)
            generations = (self.rounds.generation,) * len(versions)
            merged = tuple(r.size for r in self.account(member).merged) if member.state == "active" else ()
            welcome = msg.Welcome(
                member.incarnation, self.run, self.manifest, generations, versions, member.slot, merged
            )
            return [do.Send(member.session, welcome)]
        if self._seeder is None:
            self._seeder = member.session
            self._lease += 1
        if self._seeder != member.session:
            return []
        return [do.Send(member.session, msg.SeedGrant(self._lease, member.incarnation, self.run, self.options))]

    def _seed_plan(self, member: Member, message: msg.SeedPlan) -> list[SyncerAction]:
        if self.manifest is not None or member.session != self._seeder or message.lease != self._lease:
            return self._invite(member) if self.manifest is not None else []
        if self._pending_manifest is not None:
            return []
        if problem := manifests.defect(message.manifest):
            return self._refuse_seed(member, msg.Rejected("config", problem))
        config = cast("dict[str, object]", message.manifest["config"])
        asked = cast("dict[str, object]", message.manifest.get("asked", {}))
        if found := admission.contradictions(self.options, config, asked):
            return self._refuse_seed(member, msg.Rejected("config", "; ".join(found)))
        self._pending_manifest = message.manifest
        started = do.Record(records.encode(records.Seeding(message.lease)))
        return [started, do.StoreSeed(member.session, message.lease, message.manifest)]

    def _seed_stored(self, event: on.SeedStored, now_s: float) -> list[SyncerAction]:
        if event.lease != self._lease or self._pending_manifest is None:
            return []
        manifest, self._pending_manifest = self._pending_manifest, None
        if event.is_refused and self.seeder is not None:
            return self._refuse_seed(self.seeder, msg.Rejected("plan", event.error or ""))
        if event.error is not None:
            return [do.Note("suspended", {"reason": event.error})]
        record = records.Seeded(event.lease, manifest, self.secret)
        self.apply(record)
        self.set_digests(dict(enumerate(event.digests)))
        todo: list[SyncerAction] = [do.Record(records.encode(record)), do.Note("seeded", {"lease": event.lease})]
        return todo + [a for member in self.roster.in_state("joining") for a in self._invite(member)]

    def _seed_again(self) -> list[SyncerAction]:
        """Grant the seeder a new lease, because a shard has lost its start values."""
        seeder, self._seeder, self._pending_manifest = self.seeder, None, None
        return [] if seeder is None else self._invite(seeder)

    def _refuse_seed(self, member: Member, rejected: msg.Rejected) -> list[SyncerAction]:
        """Refuse a seeder's start values, forget its session, and let another learner seed (rule 2)."""
        self._seeder = self._pending_manifest = None
        record = records.Forgotten(member.session)
        self.apply(record)
        note = do.Note("rejected", {"learner": member.learner, "text": rejected.text})
        todo: list[SyncerAction] = [do.Record(records.encode(record)), do.Send(member.session, rejected), note]
        return todo + self._invite_next_seeder(self._now_s)

    def _invite_next_seeder(self, now_s: float) -> list[SyncerAction]:
        others = [m for m in self.roster.in_state("joining") if now_s - m.heard_s <= self.config.lease_s]
        return self._invite(others[0]) if others else []

    def set_digests(self, digests: Mapping[int, str]) -> None:
        """Set digests of the published values at the current versions, by fragment."""
        for p, digest in digests.items():
            f = self.rounds.fragments[p]
            f.note_digest(f.version, digest)

    def _confirm(self, member: Member, confirm: msg.Confirm, now_s: float) -> list[SyncerAction]:
        if self.manifest is None or confirm.incarnation != member.incarnation or member.state == "left":
            return []
        if member.state == "joining":
            if rejected := admission.mismatch(confirm, self.manifest):
                note = do.Note("rejected", {"learner": member.learner, "text": rejected.text})
                return [do.Send(member.session, rejected), note]
            member.state = "confirmed"
            if self.first_confirmed_s is None:
                self.first_confirmed_s = now_s
        if not self._may_start(now_s):
            return []
        waiting = [m for m in self.roster.in_state("confirmed") if m is not member]
        return [a for m in [member, *waiting] for a in self._activate(m, now_s)]

    @property
    def seeder(self) -> Member | None:
        """The session that holds the seed lease."""
        return self.roster.get(self._seeder) if self._seeder else None

    @property
    def num_awaited(self) -> int:
        """Number of learners that the first step still waits for."""
        if self._has_started or self.expect is None:
            return 0
        return max(0, self.expect - len(self.roster.in_state("confirmed", "active", "left")))

    @property
    def seed_grant(self) -> tuple[str, int] | None:
        """Session and number of the seed lease; None if it is not granted."""
        return None if self._seeder is None else (self._seeder, self._lease)

    def _may_start(self, now_s: float) -> bool:
        if not self._has_started:
            num_ready = len(self.roster.in_state("confirmed", "active", "left"))
            waited_s = now_s - (now_s if self.first_confirmed_s is None else self.first_confirmed_s)
            self._has_started = num_ready >= (self.expect or 0) or waited_s >= START_HOLD_S
        return self._has_started

    def _activate(self, member: Member, now_s: float) -> list[SyncerAction]:
        announcements = tuple(self.rounds.announcements(member.session))
        proof = proofs.proof_of_session(self.secret, member.session)
        active = do.Send(member.session, msg.Active(announcements, self._run_is(member), proof))
        if member.state != "confirmed":
            return [active] if member.state == "active" else []
        replaced, old = self.roster.older(member), self.roster.active(member.learner)
        todo: list[SyncerAction] = []
        if old is not None:
            if self.rounds.is_committing(old):
                return []  # tried again at each tick and each Confirm
            todo += self.rounds.drop_contributions(old) + self.rounds.remove(old, now_s)
            todo += self._settle(old, gives_back=True)
            old.ended_s = now_s
        record = records.Activated(member.session, self.account(old).heard() if old else None)
        self.apply(record)
        member.active_s = member.stepped_s = now_s
        note = do.Note("join", {"learner": member.learner, "incarnation": member.incarnation, "where": member.where})
        return [*todo, do.Record(records.encode(record)), note, active, *map(self._fenced, replaced)]

    def _run_is(self, member: Member) -> msg.RunIs:
        return msg.RunIs(self.ledger.seen_by_others(self.account(member)), self.stopped)

    def proof(self, p: int, generation: int, version: int, digest: str) -> str:
        """Return the proof that a version was published. Any thread."""
        return proofs.proof_of_version(self.secret, p, msg.Mark(generation, version, digest))

    def _lost(self, known: tuple[msg.Mark, ...]) -> list[tuple[int, msg.Mark]]:
        fragments = self.rounds.fragments
        return admission.lost(
            known, self.rounds.generation, [f.version for f in fragments], [f.digests for f in fragments]
        )

    def _is_last(self) -> bool:
        """Return whether no learner is live and none is joining."""
        coming = self.roster.in_state("joining", "confirmed")
        is_coming = any(self._now_s - m.heard_s <= self.config.lease_s for m in coming)
        return not is_coming and not self.roster.live()

    def _pass_on_seed_lease(self, now_s: float) -> list[SyncerAction]:
        seeder = self.seeder
        if self.manifest is not None or seeder is None or now_s - seeder.heard_s <= self.config.lease_s:
            return []
        self._seeder = self._pending_manifest = None
        return self._invite_next_seeder(now_s)
