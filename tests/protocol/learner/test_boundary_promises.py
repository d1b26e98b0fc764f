"""At a boundary, a learner with several ranks takes only the actions that it promised when the step began."""

from __future__ import annotations

import pytest

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages as msg
from tests.protocol.harness import Learner, of_kind


@pytest.fixture
def learner() -> Learner:
    return Learner(has_ranks=True)


def promise(learner: Learner) -> do.Promise:
    (promised,) = of_kind(learner.handle(on.StepBegins()), do.Promise)
    return promised


def test_a_snapshot_waits_until_it_was_promised(learner: Learner) -> None:
    assert promise(learner) == do.Promise((), ())
    learner.hear(msg.Announce(0, 1))
    learner.step()
    assert not of_kind(learner.actions, do.Snapshot)  # announced too late: other ranks do not know

    assert promise(learner) == do.Promise((), (0,))
    learner.step()
    (snapshot,) = of_kind(learner.actions, do.Snapshot)
    assert (snapshot.ready.steps, snapshot.ready.stop) == (2, learner.state.tokens)


def test_an_update_lands_only_when_promised(learner: Learner) -> None:
    learner.commit(1, 1)
    promise(learner)
    learner.handle(on.Staged(1, 0, 1, None))
    learner.step()
    assert not of_kind(learner.actions, do.Land)

    assert promise(learner) == do.Promise((1,), ())
    learner.step()
    assert of_kind(learner.actions, do.Land) == [do.Land(1)]


def test_a_promised_landing_is_made_although_the_contribution_is_refused_meanwhile(learner: Learner) -> None:
    learner.hear(msg.Announce(1, 1))
    promise(learner)
    learner.step()
    (ready,) = (action.ready for action in of_kind(learner.actions, do.Snapshot))
    learner.handle(on.Encoded(1, ready.seq))
    learner.commit(1, 1)
    learner.handle(on.Staged(1, 0, 1, None))
    assert promise(learner).land == (1,)

    assert learner.hear(msg.FateIs(1, ready.seq, "refused", reason="norm")) == []
    learner.step()
    kinds = [type(action) for action in learner.actions]
    assert kinds.index(do.Land) < kinds.index(do.Forget)  # the refusal is handled after the landing
    assert learner.state.fragments[1].must_adopt == "refused"


def test_without_ranks_nothing_waits() -> None:
    learner = Learner()
    learner.hear(msg.Announce(0, 1))
    learner.step()
    assert of_kind(learner.actions, do.Snapshot)


def test_a_leaving_learner_promises_nothing(learner: Learner) -> None:
    learner.handle(on.Finish("finished", drain=False))
    assert learner.handle(on.StepBegins()) == []
