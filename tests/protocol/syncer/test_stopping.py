"""One learner ends the run for all learners; all learners know the tokens of the fleet."""

from __future__ import annotations

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.machine import SyncerState
from tests.protocol.harness import Learner, Syncer, of_kind, said


def test_a_heartbeat_is_answered_with_the_tokens_of_all_others() -> None:
    syncer = Syncer("a", "b", "c")
    syncer.beat("b", tokens=300)
    syncer.beat("c", tokens=1000)

    assert said(syncer.beat("a", tokens=5000), "a", msg.RunIs) == [msg.RunIs(1300)]


def test_a_late_learner_receives_the_tokens_of_the_fleet_before_its_first_step() -> None:
    syncer = Syncer("a", "b")
    syncer.beat("a", tokens=700)
    (active,) = said(syncer.join("late"), "late", msg.Active)

    assert active.run == msg.RunIs(700 + 100)


def test_earlier_processes_of_a_learner_count_as_others() -> None:
    syncer = Syncer("a", "b")
    syncer.beat("a", tokens=700)
    syncer.hello("a2", "a")
    syncer.now_s += 3.5  # the first process is silent
    (active,) = said(syncer.join("a2", "a", incarnation=2), "a2", msg.Active)

    assert active.run.others_tokens == 700 + 100


def test_one_learner_stops_the_run_for_all_and_the_first_reason_stays() -> None:
    syncer = Syncer("a", "b")
    (record,) = of_kind(syncer.beat("a", stop="the loss is low enough"), do.Record)
    syncer.beat("a", stop="the loss is low enough")
    syncer.beat("b", stop="something else")

    assert records.decode(record.values) == records.Stopped("the loss is low enough")
    assert [r for r in syncer.log if isinstance(r, records.Stopped)] == [records.Stopped("the loss is low enough")]
    assert said(syncer.beat("b"), "b", msg.RunIs)[0].stopped == "the loss is low enough"
    (active,) = said(syncer.join("late"), "late", msg.Active)
    assert active.run.stopped == "the loss is low enough"


def test_a_leave_can_stop_the_run_too() -> None:
    syncer = Syncer("a", "b")
    progress = msg.Progress(step=4, tokens=100, landed=(0, 0), pending=(((0, 100),),) * 2)
    syncer.tell("a", msg.Leave("finished", progress, 25.0, stop="enough"))

    assert said(syncer.beat("b"), "b", msg.RunIs)[0].stopped == "enough"


def test_a_stop_survives_a_restart_of_the_syncer() -> None:
    syncer = Syncer("a", "b")
    syncer.beat("a", stop="enough")
    replayed, restored = SyncerState(run="r"), SyncerState(run="r")
    for record in syncer.log:
        replayed.apply(record)
    restored.restore(syncer.state.saved(), 0.0)

    assert (replayed.stopped, restored.stopped) == ("enough", "enough")


def test_a_learner_counts_its_own_tokens_exactly_and_those_of_others_as_received() -> None:
    learner = Learner()
    learner.hear(msg.Active((), msg.RunIs(5000)))
    assert learner.state.fleet_tokens == 5000
    learner.step(2)
    assert learner.state.fleet_tokens == 5000 + learner.state.tokens
    learner.hear(msg.RunIs(8000))
    learner.hear(msg.RunIs(6000))  # overtaken by the message before it
    assert learner.state.fleet_tokens == 8000 + learner.state.tokens


def test_a_learner_reports_the_stop_of_the_run_until_it_has_left() -> None:
    learner = Learner()
    learner.step(2)
    (first,) = [a.message for a in learner.handle(on.StopRun("enough")) if isinstance(a, do.Say)]
    assert isinstance(first, msg.Heartbeat)
    assert first.stop == "enough"
    said_later = learner.handle(on.Finish("finished", drain=False))
    assert [m.message.stop for m in said_later if isinstance(m, do.Say) and isinstance(m.message, msg.Leave)] == [
        "enough"
    ]


def test_a_learner_receives_the_end_of_the_run() -> None:
    learner = Learner()
    assert learner.state.stopped is None
    learner.hear(msg.RunIs(0, "enough"))
    learner.hear(msg.RunIs(0))
    assert learner.state.stopped == "enough"
