"""`diloco chaos`: problems of the command line, and the overrides that precede the user's own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_diloco.cli import chaos
from lightning_diloco.cli.faults.report import failures
from lightning_diloco.cli.faults.schedule import KINDS
from lightning_diloco.cli.local.claim import claimed
from lightning_diloco.cli.main import main


def test_all_problems_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "chaos",
        "tiny/gpt",
        "--local",
        "0",
        "--faults-per-hour",
        "-1",
        "--kinds",
        "kill,fire",
        "--duration",
        "soon",
    ]
    assert main(words) == 2
    said = capsys.readouterr().err
    for part in ("--local 0", "--faults-per-hour -1", "['fire']; allowed: kill, stop", "--duration 'soon'"):
        assert part in said


def test_a_missing_rate_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "tiny/gpt", "--local", "2"]) == 2
    assert "--faults-per-hour F is missing" in capsys.readouterr().err


def test_a_repeated_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "tiny/gpt", "--local", "2", "--faults-per-hour", "9", "--kinds", "kill,stop,kill"]) == 2
    assert "--kinds kill,stop,kill: kill is given more than once; allowed: kill, stop" in capsys.readouterr().err


def test_options_are_checked_before_large_libraries_are_imported() -> None:
    code = (
        "import sys; from lightning_diloco.cli.main import main\n"
        "code = main(['chaos', 'tiny/gpt', '--local', '2'])\n"
        "raise SystemExit(code if 'torch' not in sys.modules else 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr


def test_kills_of_shards_need_shards(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chaos", "tiny/gpt", "--local", "2", "--faults-per-hour", "9"]
    assert main([*words, "--kinds", "kill,shard"]) == 2
    assert "--kinds shard: the run has one shard" in capsys.readouterr().err
    assert "shard" not in chaos._check(_parsed(words)).kinds
    assert chaos._check(_parsed([*words, "--shards", "3"])).kinds == KINDS


def test_options_that_need_a_recipe_are_refused_for_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text('"""A script."""')
    assert main(["chaos", str(script), "--local", "2", "--faults-per-hour", "9", "--duration", "1m"]) == 2
    assert "--duration and --compare need a YAML recipe" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["chaos", "syncer", "summary.json"])
def test_a_folder_with_a_run_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).mkdir()
    words = ["chaos", "tiny/gpt", "--local", "2", "--faults-per-hour", "9", "--run-dir", str(tmp_path)]
    assert main(words) == 2
    assert f"holds {name} of a run; choose a new folder" in capsys.readouterr().err


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chaos", "tiny/gpt", "--local", "2", "--faults-per-hour", "9", "--run-dir", str(tmp_path)]
    with claimed(tmp_path):
        assert main(words) == 2
    assert "in use by another `diloco run`" in capsys.readouterr().err


def test_failures_are_named_unless_ledger_and_merges_are_exact() -> None:
    assert failures({"ledger_exact": True, "replayed": "merges"}) == []
    inexact, unmerged = failures({"ledger_exact": False, "replayed": "outer steps"})
    assert "ledger is not exact" in inexact
    assert "only its outer steps" in unmerged


def test_options_of_chaos_come_first_and_the_rest_is_passed_on() -> None:
    words = ["chaos", "tiny/gpt", "--kinds", "kill", "--compare", "--seed=3", "--trainer.max_steps", "9", "--seed", "4"]
    assert chaos.split(words) == (words[:6], words[6:])


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("1.5m", 90.0), ("1.5min", 90.0), ("2h", 7200.0)])
def test_a_duration_becomes_an_absolute_time(text: str, seconds: float) -> None:
    words = ["chaos", "x", "--local", "1", "--faults-per-hour", "1", "--duration", text]
    asked = chaos._check(_parsed(words))
    clock, until = asked.overrides()
    assert clock.endswith("StepClock")
    assert float(until.partition("=")[2]) == pytest.approx(time.time() + seconds, abs=5.0)


def test_the_run_without_faults_keeps_the_schedule_of_the_run_it_is_compared_with() -> None:
    whole, cut_short = chaos._Asked(("kill",), None), chaos._Asked(("kill",), 60.0)
    assert whole.calm_overrides(70) == ["--trainer.max_steps=70"]
    assert cut_short.calm_overrides(70)[1:] == ["--trainer.callbacks.until_step=70"]


def _parsed(words: list[str]):
    import argparse

    from lightning_diloco.cli.main import build_parser

    return build_parser().parse_args(words, argparse.Namespace(passed_on=[], is_divided=False))
