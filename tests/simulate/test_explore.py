"""Random histories keep the invariants; the search detects a machine with one broken rule; fixed errors stay fixed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import structs

from lightning_diloco.cli.main import main
from lightning_diloco.config import RunConfig
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol.syncer.records import CommitRecord, Regenerated
from lightning_diloco.simulate import Fleet, Network, Pace, SimulatedLearner
from lightning_diloco.simulate.disk import Entry
from lightning_diloco.simulate.explore import History, explore
from lightning_diloco.simulate.syncer import SimulatedSyncer
from tests.simulate import test_sabotage as sabotages

Patch = pytest.MonkeyPatch


@pytest.mark.seconds
def test_histories_keep_the_invariants() -> None:
    found = explore(1, num_seeds=25)
    assert found.violation is None, found.violation
    assert found.seeds == 25
    assert found.events > 100_000


@pytest.mark.seconds
def test_takeovers_lose_records_that_were_not_announced(monkeypatch: Patch) -> None:
    """Otherwise the histories would not test the purpose of a standby."""
    lost: list[str] = []
    take_over = SimulatedSyncer.take_over

    def noted(syncer: SimulatedSyncer) -> None:
        assert syncer.standby is not None
        lost.extend(type(entry.record).__name__ for entry in syncer.disk.log[syncer.standby.has :])
        take_over(syncer)

    monkeypatch.setattr(SimulatedSyncer, "take_over", noted)
    for seed in range(1, 41, 4):
        assert explore(seed, num_seeds=4).violation is None
        if {"CommitRecord", "RangesLeased"} <= set(lost):
            return
    pytest.fail(f"only {set(lost)} were lost")


@pytest.mark.seconds
def test_histories_have_uploads_without_an_answer_and_learners_killed_between_two_actions(monkeypatch: Patch) -> None:
    """Otherwise one-way partitions and kills would not test anything new."""
    seen = set[str]()
    handle, kill = Fleet._learner_handles, Fleet.kill

    def handles(fleet: Fleet, learner: SimulatedLearner, event: on.LearnerEvent) -> None:
        if isinstance(event, on.UploadFailed) and learner.is_deaf:
            seen.add("arrived" if (learner.session, event.fragment, event.seq) in fleet.syncer.payloads else "failed")
        handle(fleet, learner, event)

    def kills(fleet: Fleet, learner: SimulatedLearner) -> None:
        seen.update(["killed between actions"] if learner.dies_in == 0 else [])
        kill(fleet, learner)

    monkeypatch.setattr(Fleet, "_learner_handles", handles)
    monkeypatch.setattr(Fleet, "kill", kills)
    assert explore(1, num_seeds=40).violation is None
    assert {"arrived", "killed between actions"} <= seen


def test_a_history_depends_only_on_its_seed() -> None:
    one, other = History(7), History(7)
    assert one.steps == other.steps != History(8).steps
    assert (one.play(), one.num_events) == (other.play(), other.num_events)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        (sabotages.commit_is_booked_twice, "may be added once"),
        (sabotages.undrained_tokens_are_forgotten, "the ledger does not balance"),
        (sabotages.a_superseded_range_is_dropped, "tokens of progress"),
        (sabotages.a_landed_merge_is_not_taken_off_the_parameters, "tokens of progress"),
        (sabotages.a_restart_forgets_the_fates, "a restart .* finds"),
        (sabotages.nothing_waits_for_the_standby, "versions went from"),
        (sabotages.learners_leave_without_draining, "unmerged after a quiet drain"),
        (sabotages.old_processes_stay_active, "two processes of one learner take part"),
        (sabotages.a_lost_payload_is_not_sent_again, "waits for a merge"),
        (sabotages.leases_never_run_out, "still take part"),
        (sabotages.a_suspension_is_not_noticed, "the lease of .* ran out"),
    ],
)
def test_a_machine_with_one_broken_rule_is_detected(
    sabotage: Callable[[Patch], None], said: str, monkeypatch: Patch
) -> None:
    sabotage(monkeypatch)
    _assert_is_found(said)


@pytest.mark.seconds
def test_a_machine_that_breaks_its_promises_is_detected(monkeypatch: Patch) -> None:
    sabotages.promises_may_be_broken(monkeypatch)
    _assert_is_found("it has promised", num_seeds=400)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        (sabotages.nobody_waits_for_superseded_learners, "in a row were not merged"),
        (sabotages.learners_leave_while_a_commit_is_written, "after it had left|does not balance"),
    ],
)
def test_a_broken_rule_that_few_histories_need_is_detected(
    sabotage: Callable[[Patch], None], said: str, monkeypatch: Patch
) -> None:
    sabotage(monkeypatch)
    _assert_is_found(said, num_seeds=2000)


def _assert_is_found(said: str, num_seeds: int = 60) -> None:
    found = explore(1, num_seeds=num_seeds).violation
    assert found is not None
    assert re.search(said, found.text)
    assert History(found.seed, kept=found.kept).play() is not None, "the shrunk history fails as well"


@pytest.mark.seconds
def test_the_command_line_prints_the_command_that_replays_a_violation(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--explore", "--seeds", "2"]) == 0
    assert "no invariant was broken" in capsys.readouterr().out
    sabotages.undrained_tokens_are_forgotten(monkeypatch)
    assert main(["simulate", "--explore", "--seeds", "60"]) == 1
    (command,) = [
        line.partition(": diloco ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("replay it")
    ]
    assert main(command.split()) == 1
    assert "AssertionError" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- what was found


def fleet_of_two(**network: float) -> tuple[Fleet, list[SimulatedLearner]]:
    config = RunConfig(sync_every=4, num_fragments=2, overlap=1, quorum=2, lease_s=5.0)
    fleet = Fleet(config, network=Network(latency_s=0.05, **network), seed=3, expect=2)
    return fleet, [fleet.start(f"l{k}", Pace(step_s=0.5, tokens=4)) for k in range(2)]


def test_only_the_fragments_of_a_shard_that_is_away_wait() -> None:
    fleet, _ = fleet_of_two()

    def versions() -> list[int]:
        return [f.version for f in fleet.syncer.state.rounds.fragments]

    fleet.run_for(10.0)
    fleet.syncer.restart_shard((1, 2), away_s=20.0)
    before = versions()
    fleet.run_for(19.0)
    during = versions()
    assert during[0] > before[0] + 3
    assert during[1] == before[1]
    fleet.run_for(10.0)
    assert versions()[1] > during[1]
    fleet.invariants.audit()


def test_events_of_a_process_that_is_suspended_twice_stay_in_order() -> None:
    fleet, _ = fleet_of_two()
    fleet.run_for(10.0)
    for fragment, for_s in enumerate((2.0, 3.0)):
        fleet.syncer.suspend(for_s)
        fleet.syncer.handle(on.PayloadsLost((fragment,)))
        fleet.run_for(1.0)
    fleet.run_for(2.0)
    events = [event for _, whose, event in fleet.history if whose == "syncer"]
    assert [event.fragments for event in events if isinstance(event, on.PayloadsLost)] == [(0,), (1,)]
    assert [event.for_s for event in events if isinstance(event, on.StoodStill)] == [4.0]


def last_commit(fleet: Fleet) -> Entry:
    return next(entry for entry in reversed(fleet.syncer.disk.log) if isinstance(entry.record, CommitRecord))


def merged_again(entry: Entry, seq: int) -> Entry:
    """Return a commit like this one, of later tokens."""
    merges = tuple(
        structs.replace(m, ready=structs.replace(m.ready, seq=seq, start=10**6, stop=10**6 + 1))
        for m in entry.record.merges
    )
    return replace(entry, record=structs.replace(entry.record, merges=merges))


@pytest.mark.parametrize("ends", ["left", "replaced"])
def test_a_merge_after_the_end_of_its_process_is_detected(ends: str) -> None:
    fleet, learners = fleet_of_two()
    fleet.run_for(10.0)
    if ends == "left":
        for learner in learners:
            fleet.finish(learner)
    else:
        for learner in learners:
            fleet.kill(learner)
            fleet.start(learner.name, Pace(step_s=0.5, tokens=4))
    before = last_commit(fleet)
    fleet.run_for(30.0)
    fleet.invariants.audit()
    fleet.syncer.disk.log.append(merged_again(before, seq=10**6))
    with pytest.raises(AssertionError, match="was merged after it had left or was replaced"):
        fleet.invariants.audit()


def test_a_process_that_was_granted_before_an_older_one_took_part_may_contribute() -> None:
    fleet, _ = fleet_of_two()
    fleet.run_for(4.0)
    older = fleet.start("l9", Pace(step_s=0.5, tokens=4))
    run_until(fleet, lambda: is_granted(fleet, older))
    fleet.cut(older)
    newer = fleet.start("l9", Pace(step_s=0.5, tokens=4))
    run_until(fleet, lambda: is_granted(fleet, newer))
    fleet.cut(newer)
    older.is_cut = False
    run_until(fleet, lambda: older.is_stepping)
    fleet.heal(newer)
    run_until(fleet, lambda: newer.session in {merge.session for merge in last_commit(fleet).record.merges})
    fleet.invariants.audit()


def is_granted(fleet: Fleet, learner: SimulatedLearner) -> bool:
    return fleet.syncer.state.roster.get(learner.session) is not None


def test_a_merge_in_the_wrong_order_is_detected() -> None:
    fleet, _ = fleet_of_two()
    fleet.run_for(10.0)
    fleet.invariants.audit()
    fleet.syncer.disk.log.append(merged_again(last_commit(fleet), seq=1))
    with pytest.raises(AssertionError, match=r"had seq 1 of fragment \d merged after"):
        fleet.invariants.audit()


def run_until(fleet: Fleet, is_reached: Callable[[], bool]) -> None:
    for _ in range(2000):
        if is_reached():
            return
        fleet.run_for(0.02)
    raise AssertionError("the moment never came")


def is_told_of_a_merge(learner: SimulatedLearner, p: int) -> bool:
    """Return whether the learner knows that its contribution is merged, and the merge has not landed."""
    mine = None if learner.state is None else learner.state.fragments[p].outstanding
    return mine is not None and mine.merged_at is not None


def test_a_commit_lost_between_its_announcement_and_its_landing_blocks_no_learner() -> None:
    """Before, both learners kept fetching the lost version, and no longer contributed to its fragment."""
    fleet, learners = fleet_of_two(upload_s=0.1, download_s=1.0)
    fleet.run_for(10.0)
    run_until(fleet, lambda: all(is_told_of_a_merge(learner, 0) for learner in learners))
    version = fleet.syncer.state.rounds.fragments[0].version
    fleet.syncer.restart(lose=1)
    assert fleet.syncer.state.rounds.fragments[0].version == version - 1
    fleet.run_for(30.0)
    assert fleet.syncer.state.rounds.fragments[0].version > version + 3
    assert fleet.syncer.state.rounds.generation == 0, "nobody had landed what was lost"
    fleet.invariants.audit()


@pytest.mark.parametrize("use_snapshot", [False, True])
def test_a_syncer_that_restarts_again_still_recognizes_versions_that_its_disk_has_lost(use_snapshot: bool) -> None:
    """Before, it knew only the newest digests, and a learner that was away continued from a lost version."""
    fleet, (other, away) = fleet_of_two(upload_s=0.1, download_s=0.1)
    fleet.run_for(20.0)
    fleet.cut(away)
    fleet.kill(other)
    fleet.syncer.restart(lose=3)  # no connected learner knows the lost versions
    fleet.start("l0", Pace(step_s=0.5, tokens=4))
    fleet.run_for(20.0)  # the versions grow beyond the lost ones
    fleet.syncer.disk.take_snapshot(fleet.syncer.state)
    fleet.syncer.restart(use_snapshot=use_snapshot)
    before = fleet.syncer.state.rounds.generation
    fleet.heal(away)
    fleet.run_for(20.0)
    assert fleet.syncer.state.rounds.generation == before + 1
    fleet.invariants.audit()


def test_a_generation_lost_before_its_adoption_is_not_confused_with_the_next_one() -> None:
    """Before, both had the number 1, and learners kept the accounts of the first."""
    fleet, learners = fleet_of_two(upload_s=0.1, download_s=3.0)
    fleet.run_for(30.0)
    fleet.syncer.restart(lose=3)
    run_until(fleet, lambda: all(learner.state is not None and learner.state.generation == 1 for learner in learners))
    fleet.syncer.restart(lose=4)
    fleet.run_for(40.0)
    assert fleet.syncer.state.rounds.generation >= 1
    fleet.invariants.audit()
    for learner in learners:
        fleet.finish(learner)
    fleet.run_to_the_end(limit_s=200.0)
    fleet.run_for(8.0)
    fleet.syncer.state.finish()
    assert fleet.syncer.state.ledger.totals().is_exact


def test_a_learner_follows_a_syncer_that_has_lost_an_announced_generation() -> None:
    """Before, it ignored messages older than its unadopted generation, and the syncer ignored its messages."""
    fleet, learners = fleet_of_two(upload_s=0.1, download_s=3.0)
    fleet.run_for(30.0)
    fleet.syncer.restart(lose=3)
    run_until(fleet, lambda: all(learner.state is not None and learner.state.generation == 1 for learner in learners))
    for learner in learners:
        fleet.cut(learner)  # so that no learner sends a proof before the restart
    fleet.syncer.restart(
        lose=1 + max(k for k, entry in enumerate(reversed(fleet.syncer.disk.log)) if is_regenerated(entry))
    )
    for learner in learners:
        fleet.heal(learner)
    before = sum(f.version for f in fleet.syncer.state.rounds.fragments)
    fleet.run_for(90.0)  # full values take 12 s
    assert sum(f.version for f in fleet.syncer.state.rounds.fragments) > before + 10
    fleet.invariants.audit()


def is_regenerated(entry: Entry) -> bool:
    return isinstance(entry.record, Regenerated)


def test_a_restarted_syncer_waits_for_its_standby() -> None:
    fleet, _ = fleet_of_two(upload_s=0.1, download_s=0.1)
    fleet.run_for(10.0)
    fleet.syncer.add_standby(0.1)
    assert fleet.syncer.standby is not None
    fleet.syncer.standby.is_cut = True
    fleet.run_for(5.0)
    assert fleet.syncer.is_in_between
    fleet.syncer.restart()
    versions = [f.version for f in fleet.syncer.state.rounds.fragments]
    fleet.run_for(5.0)
    assert [f.version for f in fleet.syncer.state.rounds.fragments] == versions, "it serves nobody"
    fleet.syncer.standby.heal()
    fleet.run_for(20.0)
    assert min(f.version for f in fleet.syncer.state.rounds.fragments) > max(versions)
    fleet.syncer.take_over()
    fleet.run_for(20.0)
    fleet.invariants.audit()


def test_a_lease_that_ran_out_while_the_syncer_waited_for_its_standby_is_no_violation() -> None:
    fleet, (learner, _) = fleet_of_two()
    fleet.run_for(4.0)
    fleet.syncer.add_standby(0.05)
    standby = fleet.syncer.standby
    assert standby is not None
    fleet.cut(learner)
    standby.is_cut = True
    fleet.start("l2", Pace(step_s=0.5, tokens=4))  # the syncer waits until the standby has this learner
    fleet.run_for(fleet.config.lease_s + 1.0)
    fleet.heal(learner)
    fleet.run_for(fleet.config.lease_s + 1.0)
    standby.heal()
    fleet.run_for(1.0)  # it handles what came meanwhile: the lapse, then the return
    assert "lapse" in [note.event for _, note in fleet.syncer.notes]
    member = fleet.syncer.state.roster.get(learner.session)
    assert member is not None
    assert not member.is_lapsed
