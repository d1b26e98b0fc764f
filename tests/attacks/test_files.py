"""Files of a run are accessible to their owner only, also with planted links; texts cannot control a terminal."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lightning_diloco.cli import run as cli_run
from lightning_diloco.cli.fitting import Fit
from lightning_diloco.cli.main import main
from lightning_diloco.cli.text.printable import printable
from lightning_diloco.errors import StorageError
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.storage.files import AppendFile, write_file, write_whole
from lightning_diloco.syncer.payloads import Payloads
from lightning_diloco.syncer.status.publisher import StatusPublisher
from lightning_diloco.transport.address import new_token
from lightning_diloco.transport.frames import dumps
from tests.attacks.files import ESCAPES, plant_link, speak_in_control_characters
from tests.cli.local.test_fleet import Harness
from tests.cli.test_fit import RECIPE
from tests.fuzz.target import Target

PRECIOUS = "what is there stays"


def test_control_characters_of_a_learner_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = Target(tmp_path)
    speak_in_control_characters(target.mallory)
    target.settle()
    target.stop()
    assert main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07" in shown.replace("\n", "")
    assert set(shown) <= {"\n", *filter(str.isprintable, shown)}


def test_ordinary_text_is_shown_unchanged() -> None:
    said = {"id": "l0", "why": ["größer als 2 × 3\nzwei Zeilen", 1.5, None, True]}
    assert printable(said) == said
    assert printable(ESCAPES).isprintable()


def test_an_infinite_cosine_is_not_reported_and_breaks_no_answer() -> None:
    board = StatusPublisher(SyncerState(run="run"), Payloads())
    board.merged(("a", "b"), (0.5, math.inf))
    assert [json.loads(dumps(codec.dump(board.news(session))))["cosine"] for session in ("a", "b")] == [0.5, None]


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_whole(path, b"own"),
        lambda path: write_file(path, b"own"),
        lambda path: AppendFile(path).append([b"own"]),
    ],
    ids=["whole", "piece by piece", "appended"],
)
def test_planted_links_are_not_written_through(tmp_path: Path, write: Callable[[Path], None]) -> None:
    victim, path = tmp_path / "victim", tmp_path / "run" / "file"
    victim.write_text(PRECIOUS)
    for planted in (path, path.with_name("file.partial")):
        plant_link(planted, victim)
    try:
        write(path)
    except (StorageError, FileExistsError):
        assert path.is_symlink()
    else:
        assert path.read_bytes() == b"own"
    assert victim.read_text() == PRECIOUS


def test_a_run_directory_and_its_logs_are_accessible_to_their_owner_only(tmp_path: Path) -> None:
    run_dir = cli_run.make_run_dir(tmp_path / "runs" / "mine", "recipe")
    Harness(run_dir).run("print('a learner')")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (run_dir, run_dir / "l0" / "log.txt")}
    assert modes == {"mine": 0o700, "log.txt": 0o600}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of its parser's own libraries
def test_the_configuration_that_a_recipe_writes_does_not_contain_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, recipe = new_token(), tmp_path / "recipe.yaml"
    strategy = {"class_path": "lightning_diloco.DecoupledDiLoCoStrategy"}
    join = f"diloco://127.0.0.1:1/mine#{token},{'0' * 64}"
    content = yaml.safe_load(RECIPE)
    content["trainer"] |= {"strategy": {**strategy, "init_args": {"join": join}}, "default_root_dir": str(tmp_path)}
    recipe.write_text(yaml.safe_dump(content))
    monkeypatch.setattr("lightning.pytorch.Trainer.fit", lambda *_, **__: None)
    cli = Fit(recipe, 1, ["fit", "--config", str(recipe)])
    save = next(c for c in cli.trainer.callbacks if type(c).__name__ == "SaveRedacted")
    save.parser.save(save.config, str(tmp_path / "config.yaml"), skip_none=False, overwrite=True, multifile=False)
    written = (tmp_path / "config.yaml").read_text()
    assert token not in written
    assert "diloco://127.0.0.1:1/mine#***" in written
    assert cli.config["fit"].trainer.strategy.init_args.join == join, "what is used is whole"
