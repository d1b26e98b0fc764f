"""The files of a run on a cluster: which runs `diloco run` may take over."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from lightning_diloco.cli.local.fleet import Command
from lightning_diloco.cli.ray.files import Desk, Order, Wanted, Wants, left_alone, make_folder, places
from lightning_diloco.transport.address import JoinAddress, write_join_file


def test_a_run_is_not_left_alone_if_it_has_ended_or_its_syncer_does_not_answer(tmp_path: Path) -> None:
    make_folder(tmp_path)
    assert left_alone(tmp_path) is None
    Wanted(tmp_path).write(Wants(2, "127.0.0.1:6379", {"CPU": 1}))
    assert left_alone(tmp_path) is None, "its syncer was never served"
    write_join_file(tmp_path / "join", JoinAddress("127.0.0.1", 1, "run", "token", "0" * 64))
    assert left_alone(tmp_path) is None, "nobody answers"


def test_the_places_of_all_processes_can_be_read(tmp_path: Path) -> None:
    assert places(tmp_path) == {}
    make_folder(tmp_path)
    order = Order.of(Command(name="l0", argv=(sys.executable,), log_path=tmp_path / "log.txt"), None, "known")
    first, second, third = (Desk(tmp_path, name) for name in ("l0", "l0.1", "l1"))
    first.write_order(replace(order, num_hosts=2))
    third.write_order(order)
    first.tell("a", "began", "10.0.0.1")
    second.tell("b", "began", "10.0.0.2")
    second.tell("b", "said", "l0.1 died (exit code 1)")
    assert places(tmp_path) == {
        "l0": "on 10.0.0.1",
        "l0.1": "on 10.0.0.2 (last message: l0.1 died (exit code 1))",
        "l1": "waits for a node",
    }
    first.tell("a", "ended", "finished")
    assert places(tmp_path)["l0"] == "finished"
    first.tell("c", "began", "10.0.0.3")
    assert places(tmp_path)["l0"] == "on 10.0.0.3"
