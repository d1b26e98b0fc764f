"""Complete learners and a syncer in one process."""

from __future__ import annotations

import json
import os
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_diloco.config import LearnerConfig
from lightning_diloco.devices import cpu
from lightning_diloco.errors import (
    BusyError,
    ConfigError,
    FencedError,
    JoinError,
    PlanMismatchError,
    RefusedError,
    RunOverError,
    TransportError,
)
from lightning_diloco.learner import join as joining
from lightning_diloco.learner.control_channel import LAST_POLLS_S
from lightning_diloco.learner.whereabouts import agreed_parts
from lightning_diloco.protocol.syncer import rounds
from lightning_diloco.storage import local_runs
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.flight import FlightConnection, FlightServer
from lightning_diloco.transport.identity import ServerIdentity
from tests.learner.fleet import JOIN, OPTIONS, RUN, SHAPES, Fleet, assert_exact, finish, until


def refuse_as_busy() -> None:
    raise BusyError("too many events wait; try again")


def lose() -> None:
    raise TransportError("the call is lost")


def diloco_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("diloco-")}


def test_two_learners_drain_to_one_anchor_and_an_exact_ledger(tmp_path: Path) -> None:
    with Fleet(tmp_path, expect=2) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(9)
        finish(*learners)
        assert fleet.service.wait(5.0), "an expected fleet that has left ends the run"
        last = next(learner for learner in learners if learner.is_last)
        other = next(learner for learner in learners if learner is not last)
        assert last.landed == fleet.versions
        assert last.digests() == list(fleet.service._store.digests())
        known = [f.digests for f in fleet.service.state.rounds.fragments]
        assert [d[v] for d, v in zip(known, other.landed, strict=True)] == other.digests()
        summary = fleet.stop()
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["tokens_seen"] == sum(learner.steps for learner in learners) * 7 * 3
    assert summary["tokens_merged"] == summary["tokens_seen"]
    assert summary["eval_loss"] == 1.25
    assert_exact(summary)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["plan_digest"] == learners[0].link.plan.digest
    assert diloco_threads() == set()


def test_the_number_of_parts_is_known_before_joining_and_seeds_are_those_of_the_run(tmp_path: Path) -> None:
    with Fleet(tmp_path, run_options={**OPTIONS, "data_parts": 2}) as fleet:

        def asked() -> int | None:
            return agreed_parts(LearnerConfig(join=JOIN), connect=lambda address: fleet.connect())

        assert asked() == 2, "nobody has seeded the run"
        assert fleet.status()["learners"] == [], "nobody joins by it"
        seeds = []
        for name in ("a", "b", "c"):
            torch.manual_seed(len(seeds))
            learner = fleet.learner(name).join()
            seeds.append((learner.link.slot, learner.link.data_part, learner.link.data_seed))
        assert asked() == 2
        assert seeds == [(0, (0, 2), 0), (1, (1, 2), 0), (2, (0, 2), 0)]


@pytest.mark.seconds
def test_two_learners_drain_to_one_anchor_over_flight_with_a_pinned_certificate(tmp_path: Path) -> None:
    with Fleet(tmp_path, expect=2) as fleet:
        server = FlightServer(fleet.service, "127.0.0.1:0", token="secret", tls=ServerIdentity.create())
        with server:
            fleet.connect = lambda: FlightConnection(server.join_address(RUN))
            learners = [fleet.learner(name).go() for name in ("l0", "l1")]
            fleet.until_commits(6)
            finish(*learners)
            assert fleet.service.wait(5.0)
            last = next(learner for learner in learners if learner.is_last)
            assert last.digests() == list(fleet.service._store.digests())
            assert_exact(fleet.stop())


def test_unreachable_syncer_is_named_with_the_time_of_the_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "REACH_S", 0.3)
    monkeypatch.setattr(joining, "AGAIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # no process listens there after this block
    with Fleet(tmp_path) as fleet:
        fleet.connect = lambda: FlightConnection(JoinAddress("127.0.0.1", port, RUN, "token", "0" * 64))
        with pytest.raises(JoinError, match=r"no syncer was reached at .* in 0 s .*; start one there, or correct"):
            fleet.learner("l0").join()
    assert caplog.text.count("yet; trying for") == 1, "once, however often it is tried"


def test_a_run_that_ended_on_this_machine_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    (run_dir / "join").write_text("diloco://127.0.0.1:1/toy#token," + "0" * 64)
    (run_dir / "summary.json").write_text(f'{{"run": "{RUN}", "status": "finished"}}')
    local_runs.note(RUN, tmp_path / "elsewhere")
    local_runs.note(RUN, run_dir)  # the newest counts
    with Fleet(tmp_path / "fleet") as fleet:
        fleet.connect = lambda: FlightConnection(JoinAddress("127.0.0.1", 1, RUN, "token", "0" * 64))
        with pytest.raises(RunOverError, match=f"its summary is {run_dir}/summary.json"):
            fleet.learner("l0").join()
    assert local_runs.find("another") is None


def test_a_learner_that_has_left_does_not_report_the_end_of_the_syncer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("l0").go()
        fleet.until_commits(1)
        line = learner.link._control
        learner.wire.is_cut = True
        until(lambda: "cannot be reached" in caplog.text, "a warning while it trains")
        learner.wire.is_cut = False
        until(lambda: line.is_online, "being back")
        caplog.clear()
        line.hurry()
        learner.wire.is_cut = True
        until(lambda: not line.is_online, "noticing the cut")
        assert "cannot be reached" not in caplog.text
        learner.wire.is_cut = False
        until(lambda: line.is_online, "being back")
        learner.enough()
        learner.done()


@pytest.mark.seconds
def test_learner_trains_on_without_a_syncer_and_catches_up(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        away, other = fleet.learner("away").go(), fleet.learner("other").go()
        fleet.until_commits(6)
        away.wire.is_cut = True
        until(lambda: not away.link._control.is_online, "noticing the cut")
        before = away.steps
        fleet.until_commits(6)
        assert away.steps > before, "nobody waits for the network"
        away.wire.is_cut = False
        until(lambda: away.link._control.is_online, "being back")
        until(lambda: sum(away.landed) >= sum(fleet.versions) - 3, "catching up")
        finish(away, other)
        assert away.link.metrics()["diloco/offline_s"] > 0
        summary = fleet.stop()
    assert summary["tokens_merged"] == summary["tokens_seen"]
    assert_exact(summary)


@pytest.mark.seconds
def test_syncer_restarted_at_its_address_is_restored_bit_for_bit_and_learners_reconnect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_SITE", "us-east1")
    with Fleet(tmp_path) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(6)
        fleet.stop()
        before = fleet.versions, list(fleet.service._store.digests())
        first, second = fleet.service, fleet._served()
        assert first is not second
        fleet.service = second
        assert (fleet.versions, list(second._store.digests())) == before
        fleet.transport.handler, fleet.summary = second, None
        fleet.until_commits(6)
        shown = second.on_status()["learners"]
        assert {(learner["site"], learner["where"]) for learner in shown} == {
            ("us-east1", f"{socket.gethostname()}:{os.getpid()}")
        }
        finish(*learners)
        summary = fleet.stop()
    assert summary["tokens_seen"] == sum(learner.steps for learner in learners) * 7 * 3
    assert_exact(summary)


def test_a_slow_upload_does_not_delay_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "TRANSFER_FLOOR_S", 0.2)
    with Fleet(tmp_path, run_options={**OPTIONS, "grace": 0.0}) as fleet:
        slow, fast = fleet.learner("slow").go(), fleet.learner("fast").go()
        fleet.until_commits(3)
        let_go = threading.Event()
        slow.wire.before["put"] = lambda: (let_go.wait(20.0), None)[1]
        landed = sum(slow.landed)
        until(lambda: sum(slow.landed) >= landed + 3, "updates landing while an upload hangs")
        let_go.set()
        slow.wire.before.clear()
        finish(slow, fast)
        assert_exact(fleet.stop())


@pytest.mark.parametrize("error", [PlanMismatchError("an error the learner did not expect"), JoinError("another")])
def test_a_failing_upload_does_not_stop_the_learner(tmp_path: Path, error: Exception) -> None:
    with Fleet(tmp_path) as fleet:
        learner, failures = fleet.learner("l0").go(), [error]
        fleet.until_commits(1)

        def fail_once() -> None:
            if failures:
                raise failures.pop()

        learner.wire.before["put"] = fail_once
        fleet.until_commits(4)
        learner.enough().done()
        assert not failures
        summary = fleet.stop()
    assert summary["tokens_merged"] == summary["tokens_seen"]


@pytest.mark.seconds
def test_the_last_learner_fetches_the_final_anchor_and_reports_its_loss_although_calls_fail(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        first, last = fleet.learner("first").go(), fleet.learner("last").go()
        fleet.until_commits(3)
        first.enough().done()
        failures = dict.fromkeys(("get", "send"), 3)
        finish, report = last.link._take_final, last.link.report

        def fail(name: str) -> None:
            if failures[name]:
                failures[name] -= 1
                raise TransportError(f"{name}: reset by peer")

        def failing(call: Any, name: str) -> Any:
            def run(*args: Any) -> None:
                last.wire.before[name] = partial(fail, name)
                call(*args)

            return run

        last.link._take_final, last.link.report = failing(finish, "get"), failing(report, "send")
        last.enough().done()
        assert set(failures.values()) == {0}
        assert last.is_last
        assert last.landed == fleet.versions
        assert fleet.stop()["eval_loss"] == 1.25


@pytest.mark.seconds
def test_the_last_learner_knows_the_version_of_the_final_anchor_if_nothing_landed_before(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        other, last = fleet.learner("other").go(), fleet.learner("last", drain_s=0.2).join()
        last.wire.before["get"] = lose
        fleet.until_commits(3)
        other.enough().done()
        last.link._take_final = lambda take=last.link._take_final: last.wire.before.clear() or take()
        last.finish()
        assert last.is_last
        assert last.landed == fleet.versions
        assert last.digests() == list(fleet.service._store.digests())


@pytest.mark.seconds
@pytest.mark.parametrize("is_away", [True, False], ids=["without a syncer", "with one"])
def test_sigterm_limits_the_wait_for_the_last_contributions(tmp_path: Path, is_away: bool) -> None:
    with Fleet(tmp_path) as fleet:
        asked, stays = fleet.learner("asked", drain_s=1e6), fleet.learner("stays").go()
        asked.join().wire.before["put"] = lose  # its payloads do not arrive, but its messages do
        member = fleet.service.state.roster.active("asked")
        until(lambda: asked.step() or (fleet.num_commits >= 3 and member.tokens), "commits, and news of its work")
        asked.wire.is_cut = is_away
        assert not asked.link.finish(asked=lambda: 0.2)
        assert asked.link.is_preempted
        assert not asked.link.is_drained
        asked.link.close()
        finish(stays)
        summary = fleet.stop()
    endings = {m.learner: m.ending for m in fleet.service.state.roster.members.values()}
    assert endings == {"asked": None if is_away else "preempted", "stays": "finished"}
    assert summary["tokens_discarded"].keys() == {"lapsed" if is_away else "undrained"}
    assert_exact(summary)


@pytest.mark.seconds
def test_a_contribution_with_nan_is_refused_and_the_anchor_is_adopted(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        sick, sound = fleet.learner("sick"), fleet.learner("sound").go()
        sick.join()
        until(lambda: sick.step() or fleet.num_commits >= 3, "commits")
        with torch.no_grad():
            sick.params["bias"][3] = float("nan")
        p = next(q for q in range(3) if any(s.name == "bias" for s in sick.link.plan.fragments[q]))
        member = fleet.service.state.roster.active("sick")
        until(lambda: sick.step() or member.fates.get(p, (0, "", 0, ""))[1] == "refused", "the refusal")
        assert "bias" in member.fates[p][3], "the parameter is named"
        until(lambda: sick.step() or all(x.isfinite().all() for x in sick.params.values()), "the anchor's values")
        sound.enough()
        sick.finish()
        sound.done()
        summary = fleet.stop()
    assert summary["tokens_discarded"]["refused"] > 0
    assert all(anchor.isfinite().all() for anchor in fleet.published())
    assert_exact(summary)


def test_three_refusals_in_a_row_stop_the_learner(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("l0").join()
        for target in learner.target.values():
            target.fill_(float("inf"))
        with pytest.raises(RefusedError, match="3 contributions in a row were refused"):
            until(learner.step, "the error")
        learner.link.close()
        until(lambda: fleet.service.state.roster.in_state("left"), "the leave")
        summary = fleet.stop()
    assert summary["learners"][0]["id"] == "l0"
    assert_exact(summary)


def test_an_error_of_the_copying_thread_is_raised_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise ValueError("no such row")

    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("l0").join()
        monkeypatch.setattr(cpu, "gather_slice", fail)
        monkeypatch.setattr(learner.link, "settle", lambda: None)  # the other thread gets the error
        with pytest.raises(ValueError, match="no such row"):
            until(learner.step, "the error")
        learner.link.close()
    assert diloco_threads() == set()


def test_sent_values_are_those_of_the_boundary_although_another_thread_copies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, at_boundary, makers = list[torch.Tensor](), list[torch.Tensor](), set[str]()
    snapshot, encode, gather_slice = cpu.CpuFragments.snapshot, cpu.CpuFragments.encode, cpu.gather_slice

    def snapshotted(self: cpu.CpuFragments, p: int) -> Any:
        at_boundary.append(self.local_values(p))
        return snapshot(self, p)

    def gathered(*args: Any) -> None:
        gather_slice(*args)
        makers.add(threading.current_thread().name)

    def encoded(self: cpu.CpuFragments, taken: Any) -> Any:
        self.settle()
        copied.append(self._flat(taken.fragment, taken.buffer).clone())
        return encode(self, taken)

    monkeypatch.setattr(cpu.CpuFragments, "snapshot", snapshotted)
    monkeypatch.setattr(cpu.CpuFragments, "encode", encoded)
    monkeypatch.setattr(cpu, "gather_slice", gathered)
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("l0").go()
        fleet.until_commits(9)
        learner.enough().done()
    assert len(copied) == len(at_boundary) >= 9
    assert all(map(torch.equal, copied, at_boundary))
    assert any(name.startswith("diloco-") for name in makers), "nobody but the training thread has copied"


@pytest.mark.seconds
def test_second_process_under_a_name_in_use_is_refused(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        owner = fleet.learner("twin").go()
        fleet.until_commits(1)
        with pytest.raises(JoinError, match=r"'twin' is in use .* set DILOCO_LEARNER"):
            fleet.learner("twin").join()
        owner.enough().done()


@pytest.mark.seconds
def test_a_zombie_is_fenced_off_when_its_successor_has_taken_over(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        zombie = fleet.learner("l0").go()
        fleet.until_commits(2)
        fleet.service.state.heartbeat_s = 0.3  # a silent owner is waited for during three heartbeats
        zombie.wire.is_cut = True  # the syncer considers it dead
        successor = fleet.learner("l0").go()
        until(lambda: fleet.service.state.num_joins == 2, "the successor's join")
        fleet.until_commits(2)
        zombie.wire.is_cut = False
        with pytest.raises(FencedError, match="replaced by a newer process"):
            zombie.done()
        successor.enough().done()
        summary = fleet.stop()
    assert [m["incarnation"] for m in summary["learners"]] == [1, 2]
    assert_exact(summary)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"sync_every": 12}, ConfigError, "sync_every=12 was asked for, the run has sync_every=6"),
        ({"shapes": {**SHAPES, "bias": (17,)}}, PlanMismatchError, r"bias: \[17\] here, \[16\] in the run"),
        ({"unit": "samples"}, PlanMismatchError, "token unit 'samples', the run counts 'tokens'"),
        ({"frozen": {"base": "ab"}}, PlanMismatchError, "frozen parameters differ .* base"),
    ],
)
def test_a_joiner_that_does_not_fit_gets_the_reason(tmp_path: Path, options: dict, error: type, text: str) -> None:
    with Fleet(tmp_path) as fleet:
        first = fleet.learner("l0").join()
        with pytest.raises(error, match=text):
            fleet.learner("l1", **options).join()
        first.link.close()


def test_options_that_the_model_reduced_may_be_requested_again(tmp_path: Path) -> None:
    asked = {"num_fragments": 5, "sync_every": 6, "shapes": {"embedding": (2, 8)}}
    with Fleet(tmp_path, run_options={"block_size": 16}) as fleet:
        first = fleet.learner("l0", **asked).join()
        second = fleet.learner("l1", **asked).join()
        assert first.link.plan.num_fragments == second.link.plan.num_fragments == 2
        with pytest.raises(ConfigError, match="num_fragments=4 was asked for, the run has num_fragments=2"):
            fleet.learner("l2", **{**asked, "num_fragments": 4}).join()


def test_close_without_finish_leaves_at_once_and_is_idempotent(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("l0").join()
        learner.step()
        learner.link.close()
        learner.link.close()
        assert [m.ending for m in fleet.service.state.roster.members.values()] == ["failed"]
        summary = fleet.stop()
    assert summary["tokens_discarded"] == {"undrained": 7 * 3}
    assert summary["eval_reason"] == "the last learner ended without validating the anchor"
    assert diloco_threads() == set()


def test_a_learner_that_has_left_does_not_wait_for_its_poll(tmp_path: Path) -> None:
    """Otherwise its end would wait for the poll, which takes two of the few seconds after Ctrl-C."""
    with Fleet(tmp_path) as fleet:
        learner, waits = fleet.learner("l0").go(), list[float]()
        fleet.until_commits(1)
        poll = learner.wire.poll

        def noted(session: str, cursor: int, wait_s: float) -> Any:
            if learner.link._left is not None:
                waits.append(wait_s)
            return poll(session, cursor, wait_s)

        learner.wire.poll = noted
        learner.enough().done()
        assert max(waits, default=0.0) <= LAST_POLLS_S


def test_learners_that_wait_for_the_first_step_are_shown_as_joining(tmp_path: Path) -> None:
    with Fleet(tmp_path, expect=3) as fleet:
        waiting = [fleet.learner(name).go() for name in ("a", "b")]
        until(lambda: len(fleet.service.state.roster.in_state("confirmed")) == 2, "two of three")
        assert [(m["id"], m["phase"]) for m in fleet.status()["learners"]] == [("a", "joining"), ("b", "joining")]
        third = fleet.learner("c").go()
        fleet.until_commits(1)
        assert {m["phase"] for m in fleet.status()["learners"]} == {"stepping"}
        finish(*waiting, third)


def test_a_busy_syncer_does_not_count_as_an_outage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("a").go()
        fleet.until_commits(1)
        refusals = iter(range(3))

        def often() -> None:
            if next(refusals, None) is not None:
                refuse_as_busy()

        learner.wire.before["send"] = often
        until(lambda: next(refusals, None) is None, "refusals")
        fleet.until_commits(3)
        finish(learner)
        assert_exact(fleet.stop())
    assert "cannot be reached" not in caplog.text
