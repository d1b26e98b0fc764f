"""`diloco status`: the syncer that it asks, and how long it waits for an answer."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.cli import status
from lightning_diloco.cli.local import feed
from lightning_diloco.cli.main import main
from lightning_diloco.cli.status import PATIENCE_S, address
from lightning_diloco.errors import RemoteError, StandbyError, TransportError
from lightning_diloco.transport.address import JoinAddress

JOIN = "diloco://127.0.0.1:7654/run#secret," + "0" * 64
Watched = Callable[..., tuple[int, list[Any]]]


def test_status_of_a_finished_run_is_its_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "join").write_text(JOIN)
    (tmp_path / "summary.json").write_text(json.dumps({"status": "finished"}))
    os.utime(tmp_path / "join", (1, 1))
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"status": "finished"}


def namespace(target: object, join: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(target=str(target), join=join)


def test_status_asks_the_syncer_of_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "join").write_text(JOIN)
    assert address(namespace(tmp_path)).join_string() == JOIN
    assert address(namespace(JOIN)).join_string() == JOIN


def test_status_of_an_address_takes_the_token_from_option_or_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DILOCO_JOIN", JOIN)
    assert address(namespace("10.0.0.1:99")).join_string() == "diloco://10.0.0.1:99/run#secret," + "0" * 64
    assert address(namespace("10.0.0.1:99", JOIN.replace("secret", "other"))).token == "other"
    (tmp_path / "join").write_text(JOIN.replace("secret", "in-a-file"))
    assert address(namespace("10.0.0.1:99", str(tmp_path / "join"))).token == "in-a-file"


def test_status_of_an_address_without_a_token_names_the_source_of_the_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DILOCO_JOIN", raising=False)
    assert main(["status", "127.0.0.1:7654"]) == 2
    assert "set DILOCO_JOIN to the join string in RUN_DIR/join, or pass it with --join" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["nowhere", "."])
def test_status_of_a_target_that_is_not_a_run_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status", target]) == 2
    assert capsys.readouterr().err.startswith("diloco: ")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, Callable[[], dict[str, str]]]:
    """Return what the syncers at ports 7654 and 7655 do when they are asked; without an entry, nothing answers."""
    (tmp_path / "join").write_text(JOIN.replace("7654", "7654,127.0.0.1:7655"))
    do: dict[int, Callable[[], dict[str, str]]] = {}

    @contextmanager
    def asking(where: JoinAddress, join: Path | None = None) -> Iterator[Callable[[], dict[str, str]]]:
        def fetch() -> dict[str, str]:
            if where.port not in do:
                raise TransportError(f"nothing answers at port {where.port}")
            return do[where.port]()

        yield fetch

    monkeypatch.setattr(feed, "asking", asking)
    return do


@pytest.mark.parametrize("words", [("--json",), ("--json", "--watch")])
def test_status_of_a_run_whose_standby_has_taken_over(
    pair: dict[int, Callable[[], dict[str, str]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    states = ["open", "finished"] if "--watch" in words else ["open"]
    left = iter(states)
    pair[7655] = lambda: {"state": next(left)}
    assert main(["status", str(tmp_path), *words]) == 0
    printed = capsys.readouterr()
    assert [line.split('"')[3] for line in printed.out.splitlines() if "state" in line] == states
    assert printed.err.startswith("127.0.0.1:7654 does not serve the run; its standby at 127.0.0.1:7655 does")


def test_status_names_both_problems_if_neither_serves(
    pair: dict[int, Callable[[], dict[str, str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> dict[str, str]:
        raise StandbyError("it is the standby")

    pair[7655] = refuse
    assert main(["status", str(tmp_path)]) == 2
    assert "nothing answers at port 7654; its standby: it is the standby" in capsys.readouterr().err


class Syncer:
    """A syncer and its clock: it answers in each second of `answers`, and refuses in the others."""

    def __init__(self, answers: dict[int, str]) -> None:
        self._answers, self.now_s = answers, 0.0

    def status(self) -> dict[str, str]:
        if (state := self._answers.get(int(self.now_s))) is None:
            raise RemoteError("the token is refused")
        return {"state": state}

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    @contextmanager
    def asking(self, *address: object) -> Iterator[Callable[[], dict[str, str]]]:
        yield self.status


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Watched:
    """Watches a syncer to the end: exit code, and the states printed."""
    (tmp_path / "join").write_text(JOIN)
    monkeypatch.chdir(tmp_path)

    def watch(answers: dict[int, str]) -> tuple[int, list[Any]]:
        syncer = Syncer(answers)
        monkeypatch.setattr(feed, "asking", syncer.asking)
        monkeypatch.setattr(status, "time", syncer)
        exit_code = main(["status", ".", "--watch", "--json"])
        printed = capsys.readouterr().out.replace("}\n{", "}\n\n{").split("\n\n")
        return exit_code, [json.loads(text) for text in printed]

    return watch


TRAINING, FINISHED, SUMMARY = {"state": "training"}, {"state": "finished"}, {"rounds": 7}


def test_a_watch_outlasts_a_new_token_and_a_restart(watched: Watched) -> None:
    late = int(PATIENCE_S)
    assert watched({0: "training", late: "training", late + 1: "finished"}) == (0, [TRAINING, TRAINING, FINISHED])


def test_a_watch_of_a_finished_run_prints_once(watched: Watched) -> None:
    assert watched({0: "finished"}) == (0, [FINISHED])


def test_a_watch_ends_with_an_error_after_a_long_silence(watched: Watched) -> None:
    assert watched({0: "training", int(PATIENCE_S) + 2: "training"}) == (2, [TRAINING])


def test_a_watch_of_a_syncer_that_has_ended_shows_the_summary(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_first_then_always = itertools.chain([None], itertools.repeat(SUMMARY))
    monkeypatch.setattr(status, "last_summary", lambda run_dir: next(at_first_then_always))
    assert watched({0: "training"}) == (0, [TRAINING, SUMMARY])
