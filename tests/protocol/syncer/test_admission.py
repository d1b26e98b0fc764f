"""Admission of learners: seeds, contradictions, names in use, incarnations, and the hold before the first step."""

from __future__ import annotations

import pytest

from lightning_diloco.config import RunConfig
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.syncer import records
from tests.protocol.harness import Syncer, confirm, manifest, of_kind, ready, said

# ---------------------------------------------------------------------------------------------------------- the seed


def test_an_empty_run_has_one_seeder_and_all_others_wait() -> None:
    syncer = Syncer()
    (grant,) = said(syncer.hello("a"), "a")
    assert isinstance(grant, msg.SeedGrant)

    assert said(syncer.hello("b"), "b") == []
    syncer.tell("a", msg.SeedPlan(grant.lease, manifest(syncer.config)))
    actions = syncer.handle(on.SeedStored(grant.lease, ("start",) * 2))
    assert isinstance(actions[0], do.Record)
    assert [type(m) for s in "ab" for m in said(actions, s)] == [msg.Welcome, msg.Welcome]


def test_the_seed_lease_passes_to_another_learner_when_the_seeder_falls_silent() -> None:
    syncer = Syncer()
    syncer.hello("a")
    syncer.tell("a", msg.SeedPlan(1, manifest(syncer.config)))
    syncer.now_s += 10.0
    syncer.hello("b")
    (grant,) = said(syncer.tick(6.0), "b")
    assert (type(grant), grant.lease) == (msg.SeedGrant, 2)

    # Values that the first seeder still sends belong to an expired lease.
    assert syncer.handle(on.SeedStored(1, ("start",) * 2)) == []
    assert said(syncer.tell("a", msg.SeedPlan(1, manifest(syncer.config))), "a") == []
    assert syncer.state.manifest is None


def test_a_lease_number_is_not_used_again_after_a_restart() -> None:
    syncer = Syncer()
    syncer.hello("a")
    syncer.tell("a", msg.SeedPlan(1, manifest(syncer.config)))

    (grant,) = said(syncer.restarted().hello("b"), "b")
    assert grant.lease == 2


@pytest.mark.parametrize("key", ["config", "frozen", "num_fragments", "plan_digest"])
def test_a_manifest_with_a_missing_field_is_refused(key: str) -> None:
    syncer = Syncer()
    syncer.hello("a")
    broken = {name: value for name, value in manifest(syncer.config).items() if name != key}

    (rejected,) = said(syncer.tell("a", msg.SeedPlan(1, broken)), "a")
    assert rejected.error == "config"


def test_a_seeder_cannot_override_the_syncers_flags() -> None:
    syncer = Syncer()
    syncer.state.options["sync_every"] = 8
    syncer.hello("a")

    (rejected,) = said(syncer.tell("a", msg.SeedPlan(1, manifest(syncer.config))), "a")
    assert "sync_every=8" in rejected.text
    assert "sync_every=4" in rejected.text


def test_a_model_with_fewer_slices_than_requested_is_not_a_contradiction() -> None:
    syncer = Syncer()
    syncer.state.options["num_fragments"] = 24
    syncer.hello("a")
    values = {**manifest(syncer.config), "asked": {"num_fragments": 24}}
    syncer.tell("a", msg.SeedPlan(1, values))
    syncer.handle(on.SeedStored(1, ("start",) * 2))

    (welcome,) = said(syncer.hello("b", options={"num_fragments": 24}), "b")
    assert isinstance(welcome, msg.Welcome)
    (rejected,) = said(syncer.hello("c", options={"num_fragments": 12}), "c")
    assert "num_fragments=12" in rejected.text


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("hello", "error", "found"),
    [
        ({"protocol": 1}, "join", "protocol version 1"),
        ({"protocol": 99}, "join", "protocol version 99"),
        ({"run": "other"}, "join", "run 'other' was asked for, this syncer has run 'r'"),
        ({"options": {"sync_every": 8}}, "config", "sync_every=8 was asked for, the run has sync_every=4"),
        ({"known": (msg.Mark(0, 3, "x"),) * 2}, "join", "whose syncer does not know it"),
    ],
)
def test_a_hello_with_impossible_requests_is_refused(hello: dict[str, object], error: str, found: str) -> None:
    (rejected,) = said(Syncer("a").hello("b", **hello), "b")

    assert rejected.error == error
    assert found in rejected.text


def test_all_contradictions_are_named_at_once() -> None:
    (rejected,) = said(Syncer("a").hello("b", options={"sync_every": 8, "quorum": 5}), "b")

    assert "sync_every=8" in rejected.text
    assert "quorum=5" in rejected.text


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"plan_digest": "other"}, "plan digest other"),
        ({"frozen": {"base": "f01"}}, "differ from the run's: base"),
        ({"frozen": {}}, "differ from the run's: base"),
        ({"token_unit": "samples"}, "token unit 'samples', the run counts 'tokens'"),
    ],
)
def test_another_model_is_refused(changes: dict[str, object], found: str) -> None:
    syncer = Syncer("a")
    syncer.hello("b")

    (rejected,) = said(syncer.tell("b", confirm(**changes)), "b")
    assert rejected.error == "plan"
    assert found in rejected.text


def test_an_unknown_token_unit_is_not_a_difference() -> None:
    syncer = Syncer("a")
    syncer.hello("b")

    assert said(syncer.tell("b", confirm(token_unit=None)), "b", msg.Active)


# --------------------------------------------------------------------------------------------------------- incarnations


def test_the_same_session_always_gets_the_same_incarnation() -> None:
    syncer = Syncer("a")
    welcomes = [said(syncer.hello("b"), "b", msg.Welcome)[0] for _ in range(3)]

    assert {w.incarnation for w in welcomes} == {1}
    assert sum(isinstance(record, records.Granted) for record in syncer.log) == 2


def test_a_name_that_is_in_use_is_refused_with_its_owner() -> None:
    syncer = Syncer("a")
    assert said(syncer.hello("x", "a", where="here:1"), "x") == []  # too early to decide
    syncer.now_s += 1.0
    syncer.beat("a")

    (rejected,) = said(syncer.hello("x", "a"), "x")
    assert "learner id 'a' is in use" in rejected.text
    assert "DILOCO_LEARNER" in rejected.text


def test_a_member_reports_its_host_again_when_it_reconnects() -> None:
    syncer = Syncer("a")
    syncer.hello("a", connection=2, where="here:1", site="east")
    member = syncer.state.roster["a"]
    assert (member.where, member.site) == ("here:1", "east")


def test_a_name_whose_owner_is_silent_is_granted_after_three_heartbeats() -> None:
    syncer = Syncer("a")
    syncer.hello("x", "a")
    syncer.now_s += 1.5
    assert said(syncer.hello("x", "a"), "x") == []

    syncer.now_s += 1.6
    (welcome,) = said(syncer.hello("x", "a"), "x")
    assert welcome.incarnation == 2


def test_a_name_is_in_use_while_its_owner_is_still_joining() -> None:
    syncer = Syncer("a")
    syncer.hello("x", "c")
    syncer.hello("y", "c")
    syncer.now_s += 1.0
    syncer.hello("x", "c")

    (rejected,) = said(syncer.hello("y", "c"), "y")
    assert "in use" in rejected.text


def test_the_name_of_a_lapsed_owner_is_granted_at_once() -> None:
    syncer = Syncer("a", "b")
    syncer.now_s += 10.0
    syncer.beat("b")
    syncer.tick(6.0)

    assert said(syncer.hello("x", "a"), "x", msg.Welcome)


def test_the_old_process_takes_part_until_the_new_one_confirms() -> None:
    syncer = Syncer("a")
    syncer.hello("x", "a")
    syncer.now_s += 3.5
    syncer.hello("x", "a")
    assert said(syncer.intent("a"), "a") == [msg.Announce(0, 1)]

    actions = syncer.tell("x", confirm(2))
    (rejected,) = said(actions, "a")
    assert rejected.error == "fenced"
    assert [m.session for m in syncer.state.roster.in_state("active")] == ["x"]


def test_a_new_incarnation_drops_and_books_what_the_old_one_had_not_merged() -> None:
    syncer = Syncer("a")
    syncer.payload("a", ready(stop=60))
    syncer.hello("x", "a")
    syncer.now_s += 3.5
    syncer.hello("x", "a")
    actions = syncer.tell("x", confirm(2))

    assert of_kind(actions, do.DropPayload) == [do.DropPayload("a", 0, 1)]
    assert syncer.state.ledger.totals().discarded == {"lapsed": 2 * 100}


def test_an_older_incarnation_that_confirms_late_is_fenced_off() -> None:
    syncer = Syncer("a")
    syncer.hello("x", "c")
    syncer.hello("y", "c")
    syncer.now_s += syncer.config.lease_s + 0.5
    syncer.hello("y", "c")
    syncer.tell("y", confirm(2))

    (rejected,) = said(syncer.tell("x", confirm(1)), "x")
    assert rejected.error == "fenced"
    assert syncer.state.roster["y"].state == "active"


def test_a_late_confirm_does_not_reactivate_a_learner_that_has_left() -> None:
    syncer = Syncer("a")
    leave(syncer, "a")

    assert of_kind(syncer.tell("a", confirm()), do.Record) == []
    assert syncer.state.roster["a"].state == "left"


def test_hellos_of_an_older_connection_are_ignored() -> None:
    syncer = Syncer("a")
    syncer.hello("a", connection=5)

    assert syncer.hello("a", connection=4) == []


def test_a_joiner_receives_the_open_rounds() -> None:
    syncer = Syncer("a")
    syncer.intent("a", 1)

    (active,) = said(syncer.join("b"), "b", msg.Active)
    assert active.announcements == (msg.Announce(1, 1),)


# ------------------------------------------------------------------------------------------------ before the first step


def test_the_first_step_waits_for_the_expected_learners() -> None:
    syncer = Syncer(expect=2)
    syncer.seed("a")
    assert said(syncer.join("a"), "a", msg.Active) == []

    actions = syncer.join("b")
    assert said(actions, "a", msg.Active)
    assert said(actions, "b", msg.Active)


def test_the_hold_ends_after_a_minute() -> None:
    syncer = Syncer(expect=2)
    syncer.seed("a")
    syncer.join("a")
    assert said(syncer.tick(59.0), "a", msg.Active) == []

    assert said(syncer.tick(1.0), "a", msg.Active)


def test_learners_that_join_after_the_start_do_not_wait() -> None:
    syncer = Syncer(expect=1)
    syncer.seed("a")
    syncer.join("a")

    assert said(syncer.join("b"), "b", msg.Active)


def slots_of(names: str, parts: int | None) -> list[int]:
    """Return the slots of learners with these names, in the order in which they join."""
    syncer = Syncer(*names.split(), data_parts=parts)
    found = {m.learner: m.slot for m in syncer.state.roster.members.values()}
    return [found[name] for name in names.split()]


@pytest.mark.parametrize(
    ("names", "parts", "slots"),
    [
        ("l0 l1 l2 l3", 4, [0, 1, 2, 3]),
        ("l3 l2 l1 l0", 4, [3, 2, 1, 0]),
        ("node1 node3 node5 node7", 4, [1, 3, 0, 2]),
        ("gpu-12 gpu-16 gpu-20 gpu-24", 4, [0, 1, 2, 3]),
        ("a-0 b-0 c-0", 3, [0, 1, 2]),
        ("a b c", 2, [0, 1, 2]),
        ("l1 x l0", None, [0, 1, 2]),
    ],
)
def test_every_part_of_the_data_has_a_reader(names: str, parts: int | None, slots: list[int]) -> None:
    assert slots_of(names, parts) == slots


def test_a_slot_is_kept_over_restarts_of_a_learner() -> None:
    syncer = Syncer("l0", "l3", "x", data_parts=4)
    slots = {m.learner: m.slot for m in syncer.state.roster.members.values()}
    assert slots == {"l0": 0, "l3": 3, "x": 1}

    leave(syncer, "l3")
    (welcome,) = said(syncer.hello("again", "l3"), "again")
    assert (welcome.slot, welcome.incarnation) == (3, 2)


def test_the_part_of_a_lost_learner_goes_to_the_next_one_that_joins() -> None:
    syncer = Syncer("a", "b", data_parts=2)
    leave(syncer, "a")
    (welcome,) = said(syncer.hello("c", "c"), "c")
    assert welcome.slot == 0
    (welcome,) = said(syncer.hello("again", "a"), "again")
    assert welcome.slot == 2, "its own part has another reader"


def leave(syncer: Syncer, session: str) -> list[do.SyncerAction]:
    progress = msg.Progress(step=4, tokens=100, landed=(0, 0), pending=(((0, 100),),) * 2)
    return syncer.tell(session, msg.Leave("finished", progress, 25.0))


def test_options_are_compared_with_the_values_that_the_run_uses() -> None:
    assert said(Syncer("a").hello("b", options=RunConfig(sync_every=4, num_fragments=2, overlap=1).to_dict()), "b")
