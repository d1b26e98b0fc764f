"""The options of the live page, and its content."""

from __future__ import annotations

import io
import json
import sys
import urllib.request
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console

from lightning_diloco.cli import page, run
from lightning_diloco.cli.local.display import Screen
from lightning_diloco.cli.local.fleet import Command
from lightning_diloco.cli.ray.files import Desk, Order, make_folder
from lightning_diloco.errors import ConfigError
from tests.live.told import status


@pytest.mark.seconds
def test_the_page_shows_the_messages_of_the_screen(tmp_path: Path) -> None:
    said: list[str] = []
    with page.served(tmp_path, page.LISTEN, said.append) as watch:
        screen = Screen(Console(file=io.StringIO()), live=False, watch=watch)
        screen.say("l1 died (exit code 1); restart 1 of 3")
        screen.show(status(10))
        url = said[0].split()[2]
        with urllib.request.urlopen(f"{url}state.json", timeout=10) as answer:
            state = json.load(answer)
    assert url.startswith("http://127.0.0.1:")
    assert state["status"]["num_commits"] == 1
    assert [event["level"] for event in state["events"]] == ["bad"]


def test_status_lines_are_no_events(tmp_path: Path) -> None:
    with page.served(tmp_path, page.LISTEN, lambda text: None) as watch:
        screen = Screen(Console(file=io.StringIO()), live=False, watch=watch, clock=count(0.0, 9.0).__next__)
        screen.show(status(10))
        assert watch.state()["events"] == []


def test_the_page_shows_where_the_processes_of_a_cluster_are(tmp_path: Path) -> None:
    order = Order.of(Command(name="l0", argv=(sys.executable,), log_path=tmp_path / "log.txt"), None, "known")
    with page.served(tmp_path, page.LISTEN, lambda text: None) as watch:
        assert watch.state()["places"] == {}
        make_folder(tmp_path)
        Desk(tmp_path, "l0").write_order(order)
        Desk(tmp_path, "l0").tell("a", "began", "10.0.0.1")
        assert watch.state()["places"] == {"l0": "on 10.0.0.1"}


def test_options_of_the_page_are_not_passed_on_to_the_recipe() -> None:
    words = ["run", "r.yaml", "--local", "2", "--page", "127.0.0.1:8080", "--no-page", "--trainer.max_steps", "6"]
    assert run.split(words) == (words[:7], words[7:])


def test_wandb_is_an_option_of_a_recipe_and_the_environment_of_a_script() -> None:
    assert run._tracking(None, Path("gpt.yaml")) == ([], None)
    options = ["--trainer.callbacks+=lightning_diloco.tracking.Wandb", "--trainer.callbacks.project=mine"]
    assert run._tracking("mine", Path("gpt.yaml")) == (options, None)
    arguments, tell = run._tracking("mine", Path("train.py"))
    assert (arguments, tell is not None) == ([], True)


def test_a_missing_wandb_is_reported_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--wandb mine: .*pip install 'lightning-diloco\[wandb\]'"):
        run._tracking("mine", Path("gpt.yaml"))


def test_an_invalid_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), page.served(tmp_path, "8080", lambda text: None):
        pass
