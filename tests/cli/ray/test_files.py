"""The files of a run on a cluster: which runs `diloco run` may take over."""

from __future__ import annotations

from pathlib import Path

from lightning_diloco.cli.ray.files import Wanted, Wants, left_alone, make_folder
from lightning_diloco.transport.address import JoinAddress, write_join_file


def test_a_run_is_not_left_alone_if_it_has_ended_or_its_syncer_does_not_answer(tmp_path: Path) -> None:
    make_folder(tmp_path)
    assert left_alone(tmp_path) is None
    Wanted(tmp_path).write(Wants(2, "127.0.0.1:6379", {"CPU": 1}))
    assert left_alone(tmp_path) is None, "its syncer was never served"
    write_join_file(tmp_path / "join", JoinAddress("127.0.0.1", 1, "run", "token", "0" * 64))
    assert left_alone(tmp_path) is None, "nobody answers"
