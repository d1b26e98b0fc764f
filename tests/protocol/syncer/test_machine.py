"""State beyond the life of a process: leases, leaves, rolled-back disks, and restarts from log and snapshot."""

from __future__ import annotations

import json

import pytest

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import codec, messages
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.data_ranges import Span
from lightning_diloco.protocol.syncer import joins, records
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.protocol.syncer.proofs import proof_of_session
from lightning_diloco.simulate.invariants import durable
from tests.protocol.harness import Syncer, confirm, members, of_kind, ready, said


@pytest.fixture
def syncer() -> Syncer:
    return Syncer("a", "b")


def leave(syncer: Syncer, session: str, **fields: object) -> list[do.SyncerAction]:
    values = {"step": 4, "tokens": 100, "landed": (0, 0), "pending": (((0, 100),),) * 2, **fields}
    return syncer.tell(session, msg.Leave("finished", msg.Progress(**values), 25.0))  # type: ignore[arg-type]


def lapse(syncer: Syncer, session: str) -> list[do.SyncerAction]:
    others = [m.session for m in syncer.state.roster.live() if m.session != session]
    actions: list[do.SyncerAction] = []
    for _ in range(4):
        actions += syncer.tick(4.0)
        for other in others:
            syncer.beat(other, step=int(syncer.now_s))
    return actions


# ------------------------------------------------------------------------------------------------------ leases, leaves


def test_a_lapse_makes_tokens_absent_and_not_discarded(syncer: Syncer) -> None:
    lapse(syncer, "b")

    totals = syncer.state.ledger.totals()
    assert (totals.absent, dict(totals.discarded), totals.is_exact) == (200, {}, True)
    assert (syncer.state.num_lapses, syncer.state.roster["b"].is_live) == (1, False)


def test_rounds_do_not_wait_for_a_lapsed_learner(syncer: Syncer) -> None:
    lapse(syncer, "b")
    syncer.intent("a")

    assert members(syncer.contribute("a", ready())) == ["a"]


def test_a_restart_restores_the_ledger_if_a_learner_lapsed_while_its_commit_was_being_written(syncer: Syncer) -> None:
    """The lapse is after the commit in the log, and has the counter of before it."""
    syncer.intent("a")
    syncer.contribute("a", ready())
    syncer.contribute("b", ready(stop=120))
    syncer.merge()
    action = syncer.applying.pop(0)
    syncer.log.append(records.decode(action.record))
    lapse(syncer, "b")
    syncer.handle(on.Committed(0, action.round, "digest"))

    assert syncer.state.ledger.totals().is_exact
    assert syncer.restarted().state.ledger.totals() == syncer.state.ledger.totals()


def test_a_lapse_restores_the_counter_of_its_record_and_not_of_an_older_snapshot(syncer: Syncer) -> None:
    syncer.beat("b", tokens=140)
    saved, num_records = syncer.state.saved(), len(syncer.log)
    again = syncer.restarted()  # without the snapshot, so it does not know of this counter
    again.now_s += 1000.0
    again.beat("a")
    again.tick()
    restored = SyncerState(run="r")
    restored.restore(saved, again.now_s)
    for record in again.log[num_records:]:
        restored.apply(record)

    assert again.state.num_lapses == restored.num_lapses == 1
    assert restored.ledger.totals() == again.state.ledger.totals()


def test_a_learner_that_returns_continues_its_account(syncer: Syncer) -> None:
    lapse(syncer, "b")
    actions = syncer.beat("b", tokens=140)
    assert [type(a).__name__ for a in actions[:2]] == ["Record", "Note"]

    assert syncer.state.ledger.totals().absent == 0
    syncer.beat("b", tokens=140, step=500)
    syncer.intent("a")
    syncer.contribute("a", ready())
    assert members(syncer.contribute("b", ready(stop=140))) == ["a", "b"]


def test_only_the_end_of_the_run_discards_tokens_of_a_lapsed_learner(syncer: Syncer) -> None:
    lapse(syncer, "b")
    leave(syncer, "a", pending=((), ()), discarded={"overwritten": 200})
    assert syncer.state.is_finished

    syncer.state.finish()
    totals = syncer.state.ledger.totals()
    assert (dict(totals.discarded), totals.pending, totals.is_exact) == ({"overwritten": 200, "lapsed": 200}, 0, True)


def test_a_leave_books_unmerged_tokens_as_undrained_and_is_acknowledged_each_time(syncer: Syncer) -> None:
    syncer.payload("a", ready())
    actions = leave(syncer, "a")
    assert of_kind(actions, do.DropPayload) == [do.DropPayload("a", 0, 1)]
    assert said(actions, "a") == [msg.LeaveNoted(False)]
    assert syncer.state.ledger.totals().discarded == {"undrained": 200}

    again = leave(syncer, "a")
    assert (of_kind(again, do.Record), said(again, "a")) == ([], [msg.LeaveNoted(False)])


def test_a_leave_waits_for_a_commit_that_names_the_leaver(syncer: Syncer) -> None:
    syncer.intent("a")
    syncer.contribute("a", ready())
    syncer.contribute("b", ready())
    syncer.merge()
    assert leave(syncer, "a") == []

    syncer.committed()
    leave(syncer, "a")
    assert syncer.state.ledger.totals().discarded == {"undrained": 100}


def test_the_last_learner_to_leave_is_informed(syncer: Syncer) -> None:
    leave(syncer, "a")

    assert said(leave(syncer, "b"), "b") == [msg.LeaveNoted(True)]
    assert syncer.state.is_finished


def test_no_learner_is_the_last_while_a_newcomer_adopts(syncer: Syncer) -> None:
    syncer.hello("c")
    leave(syncer, "a")
    assert said(leave(syncer, "b"), "b") == [msg.LeaveNoted(False)]

    syncer.tick(20.0)  # the newcomer never confirmed
    assert syncer.state.is_finished


def test_the_loss_reported_by_the_last_learner_is_kept(syncer: Syncer) -> None:
    leave(syncer, "a")
    syncer.tell("a", msg.Evaluated(1.5))

    assert (syncer.state.eval_loss, syncer.state.has_verdict) == (1.5, True)


def test_a_loss_of_an_outdated_anchor_is_dropped(syncer: Syncer) -> None:
    lapse(syncer, "b")
    leave(syncer, "a")
    syncer.tell("a", msg.Evaluated(1.5))
    syncer.beat("b")
    assert syncer.state.has_verdict
    syncer.full_round(b=ready())

    assert (syncer.state.eval_loss, syncer.state.has_verdict) == (None, False)


def test_reports_of_a_wrong_length_are_ignored(syncer: Syncer) -> None:
    (note,) = of_kind(syncer.beat("a", landed=(0,)), do.Note)
    assert note.event == "ignored"
    (note,) = of_kind(leave(syncer, "a", pending=()), do.Note)
    assert note.event == "ignored"


def test_reports_that_contradict_the_commits_are_detected(syncer: Syncer) -> None:
    syncer.beat("a", tokens=300, pending=(((0, 200),),) * 2)

    assert syncer.state.num_inexact == 1


@pytest.mark.parametrize("p", [-1, 2, 10**6])
def test_a_fragment_that_does_not_exist_is_ignored(syncer: Syncer, p: int) -> None:
    for message in (msg.Intent(p, 1.0), ready(p), msg.Decline(p, 1), msg.AskFate(p, 1)):
        assert [type(a) for a in syncer.tell("a", message)] == [do.Note]
    assert of_kind(syncer.payload("a", ready(p)), do.DropPayload) == [do.DropPayload("a", p, 1)]


def test_an_unknown_process_is_rejected(syncer: Syncer) -> None:
    (rejected,) = said(syncer.tell("nobody", msg.Intent(0, 1.0)), "nobody")
    assert rejected.error == "join"


# -------------------------------------------------------------------------------------------------- a rolled-back disk


def hello_again(
    syncer: Syncer, session: str, *marks: tuple[int, int, str], is_proved: bool = True
) -> list[do.SyncerAction]:
    known = tuple(syncer.proved(p, *mark) if is_proved else msg.Mark(*mark, "0" * 32) for p, mark in enumerate(marks))
    proof = proof_of_session(syncer.state.secret, session) if is_proved else "0" * 32
    return syncer.hello(session, connection=2, known=known, proof=proof)


def test_a_known_process_is_welcomed_back_without_a_new_generation(syncer: Syncer) -> None:
    syncer.full_round(0, a=ready(), b=ready())
    actions = hello_again(syncer, "a", (0, 1, "0@1"), (0, 0, "start"))

    (welcome,) = said(actions, "a")
    assert (welcome.generations, welcome.versions, welcome.merged) == ((0, 0), (1, 0), (100, 0))


@pytest.mark.parametrize(
    "marks",
    [
        ((0, 2, "x"), (0, 0, "start")),
        ((0, 1, "other"), (0, 0, "start")),
        ((3, 0, "start"), (0, 0, "start")),
    ],
    ids=["a version not reached here", "other values of a version", "a generation not reached here"],
)
def test_a_learner_that_proves_lost_versions_starts_a_new_generation(
    syncer: Syncer, marks: tuple[tuple[int, int, str], ...]
) -> None:
    syncer.full_round(0, a=ready(), b=ready())
    syncer.payload("b", ready(1))
    actions = hello_again(syncer, "a", *marks)

    generation = max(mark[0] for mark in marks) + 1
    for session in "ab":
        (welcome,) = said(actions, session)
        assert welcome.generations == (generation,) * 2
    assert syncer.log[-1] == records.Regenerated(generation)
    assert syncer.state.rounds.fragments[1].held == {}


def test_a_new_generation_waits_for_a_commit_that_is_being_written(syncer: Syncer) -> None:
    syncer.intent("a")
    syncer.contribute("a", ready())
    syncer.contribute("b", ready())
    syncer.merge()
    assert said(hello_again(syncer, "a", (0, 5, "x"), (0, 0, "start")), "a") == []

    (commit, welcome) = said(syncer.committed(), "a")
    assert (commit.generation, welcome.generations, welcome.versions) == (0, (1, 1), (1, 0))
    assert welcome.merged == (100, 0)


def test_a_contribution_of_an_older_generation_is_answered_by_a_welcome(syncer: Syncer) -> None:
    hello_again(syncer, "a", (0, 5, "x"), (0, 0, "start"))

    for actions in (syncer.tell("b", ready()), syncer.payload("b", ready()), syncer.beat("b"), leave(syncer, "b")):
        (welcome,) = said(actions, "b", msg.Welcome)
        assert welcome.generations == (1, 1)
    assert syncer.state.rounds.fragments[0].held == {}
    assert syncer.state.roster["b"].state == "active"


def test_a_report_ahead_of_the_disk_gets_a_welcome_and_proves_nothing(syncer: Syncer) -> None:
    for ahead in ({"landed": (7, 0)}, {"generation": 2**30}):
        assert said(syncer.beat("a", **ahead), "a", msg.Welcome)

    assert syncer.state.rounds.generation == 0
    assert syncer.state.num_inexact == 0


def test_no_generation_begins_without_a_proof(syncer: Syncer) -> None:
    syncer.full_round(0, a=ready(), b=ready())
    for marks in (((0, 9, "x"), (0, 0, "start")), ((2**30, 0, "x"),) * 2, ((0, 1, "other"), (0, 0, "start"))):
        (rejected,) = said(hello_again(syncer, "a", *marks, is_proved=False), "a")
        assert "no proof" in rejected.text
    syncer.hello("new")
    (rejected,) = said(hello_again(syncer, "new", (0, 1, "0@1"), (0, 0, "start"), is_proved=False), "new")
    assert "does not know it" in rejected.text
    assert said(syncer.tell("b", ready(1, generation=7)), "b", msg.Welcome)

    assert syncer.state.rounds.generation == 0
    assert syncer.state.roster["new"].state == "joining"


def test_a_proof_begins_a_generation_once(syncer: Syncer) -> None:
    for connection in range(2, 8):
        known = (syncer.proved(0, 0, 5, "x"), syncer.proved(1, 0, 0, "start"))
        syncer.hello("a", connection=connection, known=known)

    assert syncer.state.rounds.generation == 1


def test_a_process_that_trained_is_rejected_by_a_syncer_that_lost_the_run() -> None:
    syncer = Syncer("a")
    syncer.log = [r for r in syncer.log if isinstance(r, records.Granted)]

    (rejected,) = said(hello_again(syncer.restarted(), "a", (0, 0, "start"), (0, 0, "start")), "a")
    assert "Restore the run directory" in rejected.text


def test_a_learner_whose_activation_was_lost_is_activated_again() -> None:
    syncer = Syncer("a")
    syncer.log = [r for r in syncer.log if not isinstance(r, records.Activated)]
    restarted = syncer.restarted()

    actions = hello_again(restarted, "a", (0, 0, "start"), (0, 0, "start"))
    assert {type(m) for m in said(actions, "a")} == {msg.Active, msg.Welcome}
    assert restarted.state.roster["a"].state == "active"


# ---------------------------------------------------------------------------------------------------------- restarts


def eventful(monkeypatch: pytest.MonkeyPatch) -> Syncer:
    """Return a syncer that has written every kind of record."""
    syncer = Syncer("a", "b", "c", "d")
    with monkeypatch.context() as crowded:
        crowded.setattr(joins, "MAX_JOINING", 1)
        syncer.hello("e")
        syncer.now_s += syncer.config.lease_s + 1
        for session in "abcd":
            syncer.beat(session)
        syncer.hello("f")
    syncer.full_round(0, a=ready(), b=ready(stop=80), c=ready(), d=ready())
    syncer.payload("c", ready(1, seq=1), error="scales are not finite")
    lapse(syncer, "d")
    syncer.beat("d")
    syncer.beat("a", landed=(1, 0), pending=((), ((0, 100),)), discarded={})
    syncer.hello("b2", "b")
    syncer.now_s += 3.5
    syncer.join("b2", "b", incarnation=2)
    leave(syncer, "c", discarded={"refused": 100}, pending=((), ()), landed=(1, 0))
    syncer.ask_ranges("a", wanted=2)
    syncer.ask_ranges("a", Span(1, 0, 100, 100, is_whole=True, is_last=True), unread=(2,))
    syncer.beat("a", landed=(1, 0), pending=((), ((0, 100),)), stop="enough")
    for record in (records.Quarantined("b", "odd"), records.Quarantined("a", "odd"), records.Released("a")):
        syncer.state.apply(record)  # test_conduct.py tests the causes of these
        syncer.log.append(record)
    hello_again(syncer, "a", (0, 9, "x"), (0, 0, "start"))
    return syncer


def test_every_kind_of_record_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {type(record) for record in eventful(monkeypatch).log}

    assert kinds == set(messages.typing.get_args(records.LogRecord))


def test_a_restart_from_the_log_gives_the_same_durable_state(monkeypatch: pytest.MonkeyPatch) -> None:
    syncer = eventful(monkeypatch)

    assert durable(syncer.restarted().state) == durable(syncer.state)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_restart_from_a_snapshot_gives_the_same_even_if_a_record_is_applied_again(
    overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncer = eventful(monkeypatch)
    for first in range(len(syncer.log) + 1):
        before = SyncerState(run="r")
        for record in syncer.log[:first]:
            before.apply(record)
        text = json.dumps(codec.dump(before.saved()), allow_nan=False)

        after = SyncerState(run="another")
        after.restore(codec.load(records.SavedState, json.loads(text)), 0.0)
        for record in syncer.log[max(0, first - overlap) :]:
            after.apply(record)
        assert durable(after) == durable(syncer.state), f"snapshot after {first} records"


def test_a_session_survives_a_restart_with_its_incarnation(syncer: Syncer) -> None:
    syncer.full_round(0, a=ready(), b=ready())
    restarted = syncer.restarted()

    assert said(restarted.tell("a", msg.AskFate(0, 1)), "a") == [msg.FateIs(0, 1, "merged", 1)]
    (fate,) = said(restarted.payload("a", ready(seq=2, start=50, stop=150, base=1)), "a")
    assert fate.fate == "refused"
    restarted.intent("a")
    assert restarted.round().number == 2


def test_a_confirmed_learner_confirms_again_after_a_restart() -> None:
    syncer = Syncer(expect=2)
    syncer.seed("a")
    syncer.join("a")
    restarted = syncer.restarted()

    assert said(restarted.tell("a", confirm()), "a", msg.Active)


def test_after_a_restart_all_learners_have_a_new_lease(syncer: Syncer) -> None:
    restarted = syncer.restarted()
    restarted.tick(14.0)
    assert restarted.state.num_lapses == 0

    restarted.tick(2.0)
    assert restarted.state.num_lapses == 2


def test_no_answer_precedes_the_record_it_depends_on(syncer: Syncer) -> None:
    lists = [
        syncer.join("c"),
        syncer.payload("a", ready(), error="not finite"),
        leave(syncer, "b"),
        hello_again(syncer, "a", (0, 9, "x"), (0, 0, "start")),
    ]
    for actions in lists:
        kinds = [type(action) for action in actions]
        told = [i for i, action in enumerate(actions) if isinstance(action, do.Send)]
        assert do.Record in kinds
        assert kinds.index(do.Record) < min(told)
