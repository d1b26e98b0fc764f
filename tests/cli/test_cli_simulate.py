"""`diloco simulate`: options, scenarios, tables and plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.cli.main import main
from lightning_diloco.cli.scenarios import rows
from lightning_diloco.plots import forecast
from lightning_diloco.simulate import explore
from lightning_diloco.simulate.explore import Violation
from lightning_diloco.simulate.goodput import Outcome

NOTHING = Outcome(goodput=0.0, work=0.0, uptime=0.0, pauses=0)
SHORT = ["--duration", "2min", "--learners", "2"]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.seconds
def test_json_has_a_row_for_each_combination_and_the_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, *SHORT, "--chips", "64k", "2.4M", "--quorum", "1", "2", "--baseline", "dp", "dp-elastic")
    assert [(row["run"], row["chips"], row.get("quorum")) for row in found["rows"]] == [
        *((name, chips, None) for name in ("data parallel", "elastic data parallel") for chips in (64e3, 2.4e6)),
        *(("2 learners", chips, quorum) for chips in (64e3, 2.4e6) for quorum in (1, 2)),
    ]
    assert {"goodput", "uptime", "rounds", "participation", "merges", "discarded"} <= found["rows"][-1].keys()
    assert any("fails once in 1y" in sentence for sentence in found["assumptions"])


@pytest.mark.seconds
def test_the_same_command_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SHORT, "--chips", "2.4M", "--jitter", "5%")
    assert told(capsys, *words) == told(capsys, *words)
    assert told(capsys, *words) != told(capsys, *words, "--seed", "2")


@pytest.mark.seconds
def test_a_number_of_steps_is_a_duration(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--learners", "2", "--chips", "64k", "--step", "0.5s", "1s", "--overlap", "1")
    (row,), (same,), (other,) = (
        told(capsys, *words, *length)["rows"]
        for length in (["--steps", "100"], ["--duration", "50s"], ["--duration", "50s", "--overlap", "4"])
    )
    assert [each.pop("scenario")[name] for each, name in ((row, "steps"), (same, "duration"))] == [100, 50]
    assert other.pop("scenario")["overlap"] == 4
    assert row == same != other


@pytest.mark.seconds
def test_a_scenario_gives_options_and_the_command_line_takes_precedence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("learners: [2]\nchips: [64k]\nduration: 2min\nfailures_per: slice\nmtbi: 30d\n")
    found = told(capsys, str(path))
    assert [(row["learners"], row["chips"]) for row in found["rows"]] == [(2, 64e3)]
    assert "each slice fails once in 30d" in found["assumptions"][0]
    assert [row["learners"] for row in told(capsys, str(path), "--learners", "1", "2")["rows"]] == [1, 2]
    assert told(capsys, str(path), "--steps", "100")["rows"][0]["scenario"]["steps"] == 100


def test_a_bad_scenario_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("chips: many\n")
    assert main(["simulate", str(path)]) == 2
    assert "mine.yaml: chips: 'many': must be a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--learners", "0"], "'0': must be a whole number of at least 1"),
        (["--chips", "many"], "a number such as"),
        (["--quorum", "0"], "'0': must be a whole number of at least 1"),
        (["--quorum", "9", "--learners", "8"], "--quorum 9: must be at most --learners, 8"),
        (["--slice", "1M", "--chips", "1M", "--learners", "2"], "slices of 1,000,000 chips"),
        (["--plot", "x.pdf", "--duration", "1000h"], "must end in .png or .svg"),
        (["--plot", "nowhere/x.png", "--duration", "1000h"], "nowhere is no writable folder"),
        (["--steps", "100", "--duration", "2min"], "--steps and --duration exclude each other; give one of them"),
        (["--overlap", "25"], "overlap=25"),
        (["--shards", "0"], "argument --shards: '0': must be a whole number of at least 1"),
        (["--seed", "-1"], "argument --seed: '-1': must be a whole number of at least 0"),
        (["--rejoin", "5min"], "--rejoin needs --mtbf; add what is missing, or leave out --rejoin"),
        (["--for", "2min"], "--for needs --explore"),
        (["--explore", "--learners", "2", "--chips", "1k"], "--chips, --learners: not with --explore"),
        (["--explore", "--seeds", "0"], "argument --seeds: '0': must be a whole number of at least 1"),
        (["--explore", "--seeds", "-3"], "argument --seeds: '-3': must be a whole number of at least 1"),
        (["--explore", "--for", "0s"], "argument --for: '0s': must be a time such as 200ms, 2s, 30m or 6h, above 0"),
        (["--explore", "--keep", "one"], "'one': must be numbers of steps in ascending order, such as 0,3,7"),
        (["--explore", "--keep", "-1"], "'-1': must be numbers of steps in ascending order"),
        (["--explore", "--keep", "5,1"], "'5,1': must be numbers of steps in ascending order"),
        (["--explore", "--keep", "3,3"], "'3,3': must be numbers of steps in ascending order"),
        (["--explore", "--keep", "999"], "--keep 999: the history of --seed 1 has the steps 0 to "),
        (["--explore", "--keep", "1", "--seeds", "2"], "--keep and --seeds exclude each other; give one of them"),
        (["--explore", "--keep", "1", "--for", "2s"], "--keep and --for exclude each other; give one of them"),
        (["--explore", "mine.yaml"], "mine.yaml: no scenario with --explore; leave out the file, or --explore"),
    ],
)
def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    try:
        code = main(["simulate", *words])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    assert said in capsys.readouterr().err


def test_seed_0_is_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(rows, "simulate", lambda scenario: seeds.append(scenario.seed) or NOTHING)
    assert told(capsys, "--seed", "0")["rows"][0]["scenario"]["seed"] == 0
    assert seeds == [0]


def test_a_fleet_that_merges_nothing_has_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "simulate", lambda _: NOTHING)
    assert main(["simulate", "--extra", "1", "--extra-for", "1min"]) == 0
    assert "never" in capsys.readouterr().out


VIOLATION = Violation(3, (0, 1), "tokens merged twice")


def test_a_search_prints_what_it_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(explore, "explore", lambda seed, **_: explore.Found(3, 1234, VIOLATION))
    replay = "diloco simulate --explore --seed 3 --keep 0,1"
    assert main(["simulate", "--explore", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [step["number"] for step in found["violation"].pop("steps")] == [0, 1]
    violation = {"seed": 3, "text": "tokens merged twice", "replay": replay}
    assert found == {"seed": 1, "histories": 3, "events": 1234, "violation": violation}
    assert main(["simulate", "--explore"]) == 1
    said = capsys.readouterr().out
    assert (
        "histories: 3, from seed 1 on, 1,234 events checked\ntokens merged twice\nsteps that are needed:\n  0: " in said
    )
    assert said.endswith(f"replay it: {replay}\n")


@pytest.mark.seconds
def test_a_search_without_a_violation_is_told_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--explore", "--keep", ",", "--seed", "0")
    assert (found["seed"], found["histories"], found["violation"]) == (0, 1, None)


@pytest.mark.seconds
def test_tables_are_printed_by_fleet_and_by_number_of_chips(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SHORT, "--chips", "64k"]) == 0
    assert "take part" in capsys.readouterr().out
    assert main(["simulate", *SHORT, "--chips", "64k", "2.4M"]) == 0
    out = capsys.readouterr().out
    assert "64k" in out
    assert "2.4M" in out


@pytest.mark.seconds
@pytest.mark.parametrize("chips", [["1.2M"], ["64k", "1.2M"]])
def test_plots_are_drawn(tmp_path: Path, chips: list[str]) -> None:
    for kind in ("png", "svg"):
        path = tmp_path / f"goodput.{kind}"
        assert main(["simulate", *SHORT, "--chips", *chips, "--baseline", "dp", "--plot", str(path)]) == 0
        assert path.stat().st_size > 5000


@pytest.mark.seconds
def test_a_sweep_is_drawn_over_the_option_with_most_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}
    real = forecast.draw_sweep
    monkeypatch.setattr(forecast, "draw_sweep", lambda *given, **options: drawn.update(panels=given[0], **options))
    words = ["simulate", *SHORT, "--sync-every", "12", "24", "--link", "1Gbit", "5Gbit", "0.2Gbit"]
    path = tmp_path / "sweep.svg"
    assert main([*words, "--plot", str(path)]) == 0
    assert drawn["option"] == "link [bit/s]"
    for lines in drawn["panels"].values():
        assert list(lines) == ["2 learners, sync-every 12", "2 learners, sync-every 24"]
        assert all([x for x, _ in line] == [0.2e9, 1e9, 5e9] for line in lines.values())
    often = drawn["panels"]["Learners that take part in a round"]["2 learners, sync-every 12"]
    assert often[0][1] < often[-1][1], "over a slow link, fewer learners take part"
    real(drawn["panels"], path, option=drawn["option"])
    assert path.read_text().count("<svg") == 1


@pytest.mark.seconds
def test_a_baseline_has_a_line_only_if_the_option_changes_it(tmp_path: Path) -> None:
    words = ["simulate", *SHORT, "--mtbi", "30d", "1y", "--grace", "adaptive", "0", "--baseline", "dp"]
    assert main([*words, "--plot", str(tmp_path / "mtbi.svg")]) == 0
    text = (tmp_path / "mtbi.svg").read_text()
    assert text.count("data parallel") == 1
    assert text.count("2 learners, grace adaptive") == 2
    assert "30d" in text, "the axis has times with a unit"
