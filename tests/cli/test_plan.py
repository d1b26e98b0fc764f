"""`diloco plan` from its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.cli.main import main
from lightning_diloco.cli.text.quantities import bits, nbytes, seconds, share

TINY = str(Path(__file__).parents[2] / "recipes" / "tiny" / "gpt.yaml")
KEYS = {
    "parameters", "num_fragments", "fragment_bytes_up", "upload_s", "overlap_s", "learner_up_bps", "data_parallel_bps",
    "syncer_bytes", "goodput", "feasible",
}  # fmt: skip

RECIPE = """\
# A model.
# plan: --learners 3 --link 200Mbit --step 500ms
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 40
  strategy:
    class_path: lightning_diloco.DecoupledDiLoCoStrategy
    init_args: {sync_every: 8, num_fragments: 4, overlap: 2}
model:
  class_path: lightning.pytorch.demos.boring_classes.BoringModel
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == code
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def test_json_has_the_promised_figures(capsys: pytest.CaptureFixture[str]) -> None:
    figures = plan(capsys, TINY, "--learners", "2", "--link", "1Gbit")
    assert figures.keys() >= KEYS
    assert figures["parameters"] == 115_008
    assert figures["num_fragments"] == 12
    assert figures["tokens_per_step"] == 16 * 128
    assert figures["feasible"] is True
    assert figures["fix"] is None


@pytest.mark.seconds
def test_goodput_can_be_simulated_and_agrees_with_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    machines = (TINY, "--learners", "4", "--link", "1Gbit", "--step", "1s", "--mtbf", "20min", "--restart", "1min")
    formula, simulated = plan(capsys, *machines), plan(capsys, *machines, "--simulate")
    assert any("was simulated" in note for note in simulated["notes"])
    assert simulated["goodput"] != formula["goodput"]
    assert simulated["goodput"] == pytest.approx(formula["goodput"], abs=0.03)
    assert {**simulated, "goodput": 0, "notes": 0} == {**formula, "goodput": 0, "notes": 0}
    assert formula["goodput"] < 0.95


def test_any_module_can_be_planned(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = plan(capsys, str(recipe))
    assert figures["parameters"] == 32 * 2 + 2
    assert any("activations are not counted" in note for note in figures["notes"])


def test_the_recipe_s_line_is_the_default_and_options_take_precedence(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(capsys, str(recipe))["learners"] == 3
    figures = plan(capsys, str(recipe), "--learners", "5", "--overlap", "3", "--step", "1s")
    assert (figures["learners"], figures["overlap"], figures["overlap_s"]) == (5, 3, 3.0)


def test_a_plan_that_does_not_fit_ends_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    options = [TINY, "--link", "100kbit", "--step", "100ms"]
    figures = plan(capsys, *options, code=1)
    assert figures["feasible"] is False
    assert figures["fix"]["text"]
    assert main(["plan", *options]) == 1
    out = capsys.readouterr().out
    assert "It does not fit." in out
    assert "Cheapest way out:" in out


def test_text_shows_memory_exchange_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TINY, "--mtbf", "6h"]) == 0
    out = capsys.readouterr().out
    for part in ("115,008 parameters", "each device", "learner's host", "syncer's merge thread", "goodput", "It fits."):
        assert part in out


def test_learners_that_this_version_cannot_start_cause_a_warning(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(RECIPE.replace("accelerator: cpu", "accelerator: mps"))
    figures = plan(capsys, str(recipe), "--devices", "3")
    (warning,) = figures["warnings"]
    assert "does not start such a learner" in warning


def test_devices_that_would_each_hold_the_whole_model_cause_a_warning(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (warning,) = plan(capsys, str(recipe), "--devices", "3")["warnings"]
    assert "each device holds the whole model" in warning
    assert plan(capsys, str(recipe), "--devices", "1")["warnings"] == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("max_steps", "max_stepz"), "did you mean 'max_steps'?"),
        (("sync_every", "sync_evry"), "did you mean 'sync_every'?"),
        (("sync_every: 8", "sync_every: 2"), "at most sync_every=2"),
        (("BoringModel", "BoringModle"), "BoringModle"),
        (("trainer:", "trainr:"), "did you mean 'trainer'?"),
        (("# A model.", "# lightning-diloco: ~=0.9"), "is a recipe for lightning-diloco ~=0.9, this is"),
        (("# A model.", "# lightning-diloco: soon"), "names no versions"),
    ],
)
def test_a_wrong_recipe_is_refused_with_a_suggestion(
    wrong: tuple[str, str], said: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(RECIPE.replace(*wrong))
    assert main(["plan", str(recipe)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["phi3", "glm"])  # their default pad_token_id is above 512
def test_a_vocabulary_below_the_family_s_special_tokens_can_be_planned(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2, head_dim: 16"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {class_path: lightning_diloco.hf.CausalLM, init_args: {config: "
        f"{{model_type: {kind}, num_key_value_heads: 2, {sizes}}}}}}}\n"
        "data: {class_path: lightning_diloco.hf.TextData, init_args: {vocab_size: 512}}\n"
    )
    assert plan(capsys, str(recipe))["parameters"] > 2 * 512 * 32


def test_an_unknown_vocabulary_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    tokenizer = "max_bytes: 4000000\n    tokenizer: some/where"
    path.write_text(Path(TINY).read_text().replace("max_bytes: 4000000", tokenizer))
    assert main(["plan", str(path)]) == 2
    assert "set vocab_size" in capsys.readouterr().err


def test_a_script_cannot_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(Path(TINY).with_name("train.py"))]) == 2
    assert "only a YAML recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (seconds, "40ms", 0.04), (seconds, "2s", 2), (seconds, "1.5", 1.5), (seconds, "6h", 21600),
        (bits, "5Gbit", 5e9), (bits, "500Mbit/s", 5e8), (nbytes, "80GiB", 80 << 30), (nbytes, "1TB", 10**12),
        (nbytes, "7", 7), (share, "5%", 0.05), (share, "0.05", 0.05), (share, "0", 0),
    ],
)  # fmt: skip
def test_quantities_with_units_are_parsed(read: Any, text: str, value: float) -> None:
    assert read(text) == value


@pytest.mark.parametrize("option", ["--link=5", "--link=5GB", "--rtt=fast", "--step=-1s", "--mtbf=6w", "--pauses=5"])
def test_impossible_quantities_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", TINY, option])
    assert "must be a" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["learners", "devices", "syncer-cores", "max-steps"])
def test_numbers_below_one_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TINY, f"--{name}", "0"]) == 2
    assert f"--{name} 0: must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_imports_neither_datasets_nor_peft() -> None:
    """These imports would take a tenth of its time."""
    code = (
        "import sys; sys.modules |= {'datasets': None, 'peft': None}\n"
        f"from lightning_diloco.cli.main import main; raise SystemExit(main(['plan', {TINY!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
