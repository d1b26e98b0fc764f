"""A device may be some steps behind its host: only work that needs its results waits for it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.learner.fleet import OPTIONS, Fleet, assert_exact, finish, until


@pytest.mark.seconds
def test_a_device_that_is_behind_does_not_delay_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Fleet(tmp_path, run_options={**OPTIONS, "grace": 0.0}) as fleet:
        behind, other = fleet.learner("behind").go(), fleet.learner("other").go()
        fleet.until_commits(3)
        waits, caught_up, staged = threading.Event(), threading.Event(), list[int]()
        device = behind.link.device
        stage = device.stage

        def collect(snapshot: Any) -> None:
            waits.set()
            assert caught_up.wait(20.0)

        def staging(p: int, update: Any) -> Any:
            staged.append(p)
            return stage(p, update)

        monkeypatch.setattr(device, "collect", collect)
        assert waits.wait(20.0)
        monkeypatch.setattr(device, "stage", staging)
        until(lambda: staged, "an update staged while a snapshot is not computed yet")
        caught_up.set()
        finish(behind, other)
        summary = fleet.stop()
    assert summary["tokens_merged"] == summary["tokens_seen"]


@pytest.mark.seconds
def test_training_continues_while_an_anchor_is_read_from_a_device_that_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fleet(tmp_path) as fleet:
        behind = fleet.learner("behind").go()
        fleet.until_commits(3)
        device, asked, caught_up = behind.link.device, threading.Event(), threading.Event()
        anchor = device.anchor

        def anchor_in_time(p: int) -> Any:
            asked.set()
            assert caught_up.wait(20.0)
            return anchor(p)

        monkeypatch.setattr(device, "anchor", anchor_in_time)
        behind.wire.is_cut = True
        until(lambda: not behind.link._control.is_online, "noticing the cut")
        behind.wire.is_cut = False
        assert asked.wait(20.0), "who is back says hello, with what it holds"
        before = behind.steps
        until(lambda: behind.steps > before + 10, "steps while an anchor is not there yet")
        caught_up.set()
        fleet.until_commits(3)
        assert {f.generation for f in behind.link._machine.fragments} == {0}, "what it said was right"
        behind.enough().done()
        assert_exact(fleet.stop())


def test_a_loss_is_reported_after_the_device_has_computed_it(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        learner, caught_up = fleet.learner("l0").join(), threading.Event()
        learner.link.set_loss(lambda: 0.5 if caught_up.wait(20.0) else None, aside=True)
        learner.step()
        caught_up.set()
        until(lambda: learner.link._machine.metrics.get("loss") == 0.5, "the loss, although no step follows")
        assert learner.link._reported()["loss"] == 0.5
        learner.finish()


def test_a_reported_anchor_has_one_version_although_another_lands_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("l0").go()
        fleet.until_commits(3)
        device, overtaken = learner.link.device, list[int]()
        anchor = device.anchor

        def overtaken_once(p: int) -> Any:
            before, values_P = learner.landed[p], anchor(p)
            if not overtaken:
                overtaken.append(p)
                until(lambda: learner.landed[p] > before, "another landing")
            return values_P

        monkeypatch.setattr(device, "anchor", overtaken_once)
        mark = learner.link._mark(1)
        assert overtaken == [1]
        assert mark.digest == fleet.service.state.rounds.fragments[1].digests[mark.version]
        learner.enough().done()
