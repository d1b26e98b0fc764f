"""`diloco launch` fills in the files of an engine; `diloco fit` refuses what cannot work before anything is loaded."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from lightning_diloco.cli import recipes
from lightning_diloco.cli.main import main
from lightning_diloco.cli.sites.launch import ENGINES, filled
from tests.cli.launch_schemas import KUBERNETES, SKYPILOT

ROOT = Path(__file__).parents[2]
FILES = [path for engine in ENGINES for path in sorted((ROOT / "recipes/launch" / engine).iterdir())]
FIELDS = {"recipe", "folder", "learners", "last", "devices", "syncer_cores", "syncer_memory"}


def launch(*words: str) -> int:
    return main(["launch", *words])


def written(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.iterdir()) if path.is_file())


def test_every_engine_has_files_and_every_field_is_known() -> None:
    assert {path.name for path in (ROOT / "recipes/launch").iterdir() if path.is_dir()} == set(ENGINES)
    for path in FILES:
        assert set(re.findall(r"# set: (\w+)", path.read_text())) <= FIELDS


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_that_is_filled_in_has_only_its_values_changed(path: Path) -> None:
    values = {
        "recipe": "a/b",
        "folder": "own",
        "learners": 64,
        "last": 63,
        "devices": 5,
        "syncer_cores": 96,
        "syncer_memory": 330,
    }
    before, after = path.read_text().splitlines(), filled(path.read_text(), values).splitlines()
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        text, _, field = old.partition("  # set: ")
        if not field:
            assert old == new
        else:
            value = str(values[field])
            assert value in new
            assert re.sub(r"a/b|llama/1b|recipe$|\d+", "", text) == re.sub(r"a/b|\d+", "", new.replace(value, "", 1))
    if path.suffix == ".yaml":
        assert all(yaml.safe_load_all("\n".join(after)))


@pytest.mark.parametrize("engine", ENGINES)
def test_recipe_devices_and_the_plan_of_the_syncer_are_filled_in(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("mistral/12b-8gpu", "--engine", engine, "--learners", "8", "--to", str(tmp_path / "big")) == 0
    text = written(tmp_path / "big")
    assert "mistral/12b-8gpu" in text
    assert "# set:" not in text
    if engine != "ssh":
        assert re.search(r"(gpus-per-node=|H100:|nvidia.com/gpu: )8\b", text)
        assert re.search(r"(mem=|memory: )3\d\d(G|\+)", text), "12 bytes per parameter, and what arrives"
    said = capsys.readouterr().out
    assert said.index("syncer.") < said.index("learner"), "what is started first comes first"


def test_learners_on_cpus_ask_for_no_devices_and_a_script_keeps_the_machines(tmp_path: Path) -> None:
    assert launch("tiny/gpt", "--engine", "slurm", "--learners", "3", "--to", str(tmp_path / "cpu")) == 0
    assert "gpus" not in written(tmp_path / "cpu")
    assert "--array=0-2\n" in written(tmp_path / "cpu")
    assert launch("tiny/train.py", "--engine", "slurm", "--learners", "3", "--to", str(tmp_path / "script")) == 0
    assert "--gpus-per-node=1\n" in written(tmp_path / "script")
    assert "--mem=64G\n" in written(tmp_path / "script")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("tiny/gpt", "--learners", "0"), "at least 1"),
        (("tiny/gtp", "--learners", "2"), "nearest: tiny/gpt"),
        (("llama/1b-v6e", "--learners", "2"), "TPUs"),
    ],
)
def test_nothing_is_written_after_an_error(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(*words, "--engine", "slurm", "--to", str(tmp_path / "new")) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "syncer.sh").write_text("mine")
    assert launch("tiny/gpt", "--engine", "slurm", "--learners", "2", "--to", str(tmp_path)) == 2
    assert "already exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["syncer.sh"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_recipe_given_by_its_path_is_copied_under_a_name_that_needs_no_quotes(engine: str, tmp_path: Path) -> None:
    own, new = tmp_path / "mine: a run's.yaml", tmp_path / "new"
    own.write_bytes((ROOT / "recipes/tiny/gpt.yaml").read_bytes())
    assert launch(str(own), "--engine", engine, "--learners", "2", "--to", str(new)) == 0
    assert (new / "recipe" / "mine--a-run-s.yaml").read_bytes() == own.read_bytes()
    learners = next(new.glob("learner*")).read_text()
    assert re.search(r"\b(RECIPE=|RECIPE: |value: )recipe/mine--a-run-s.yaml\n", learners)


def test_a_recipe_of_the_working_directory_is_copied_because_other_machines_lack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_bytes((ROOT / "recipes/tiny/gpt.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    assert launch("mine", "--engine", "slurm", "--learners", "2", "--to", "new") == 0
    assert (tmp_path / "new" / "recipe" / "mine.yaml").exists()
    assert launch("tiny/gpt", "--engine", "slurm", "--learners", "2", "--to", "named") == 0
    assert not (tmp_path / "named" / "recipe").exists()


def test_a_configmap_is_made_only_for_a_recipe_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("tiny/gpt", "--engine", "jobset", "--learners", "2", "--to", str(tmp_path / "named")) == 0
    assert "create configmap" not in capsys.readouterr().out
    (tmp_path / "learner.yaml").write_bytes((ROOT / "recipes/tiny/gpt.yaml").read_bytes())
    words = ("--engine", "jobset", "--learners", "2", "--to", str(tmp_path / "own"))
    assert launch(str(tmp_path / "learner.yaml"), *words) == 0
    assert "kubectl create configmap diloco-recipe --from-file=recipe\n" in capsys.readouterr().out
    assert "kind: JobSet" in (tmp_path / "own" / "learner.yaml").read_text(), "although the recipe has the same name"


def faults(folder: Path) -> list[str]:
    """Return what the schemas of its engine find in the YAML files of a folder."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        for part in yaml.safe_load_all(path.read_text()):
            schema = KUBERNETES[part["kind"]] if "kind" in part else SKYPILOT
            errors = jsonschema.Draft202012Validator(schema).iter_errors(part)
            found += [f"{path.name} {error.json_path}: {error.message}" for error in errors]
    return found


@pytest.mark.parametrize("engine", ["skypilot", "jobset"])
@pytest.mark.parametrize("recipe", [None, "mistral/12b-8gpu", "tiny/gpt", "recipes/tiny/gpt.yaml", "tiny/train.py"])
def test_files_follow_the_schemas_of_their_engine(
    engine: str, recipe: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    folder = ROOT / "recipes/launch" / engine if recipe is None else tmp_path / "new"
    if recipe is not None:
        assert launch(recipe, "--engine", engine, "--learners", "2", "--to", str(folder)) == 0
    assert faults(folder) == []
    if recipe in ("tiny/gpt", "recipes/tiny/gpt.yaml"):
        assert not re.search("accelerators|nvidia", written(folder)), "these train on CPUs"


@pytest.mark.parametrize(
    ("engine", "before", "after", "says"),
    [
        ("jobset", "maxRestarts:", "maxRestart:", "'maxRestart' was unexpected"),
        ("jobset", "resources: {limits: {nvidia.com/gpu: 1}}", "resources: {limits: }", "None is not of type 'object'"),
        ("jobset", "restartPolicy: Never", "restartPolicy: OnFailure", "'Never' was expected"),
        ("skypilot", "use_spot: true", "spot: true", "'spot' was unexpected"),
        ("skypilot", "RECIPE:", "recipe:", "'recipe' does not match"),
    ],
)
def test_the_schemas_refuse_unknown_fields_and_null(
    engine: str, before: str, after: str, says: str, tmp_path: Path
) -> None:
    text = (ROOT / "recipes/launch" / engine / "learner.yaml").read_text()
    assert before in text
    (tmp_path / "learner.yaml").write_text(text.replace(before, after))
    (fault,) = faults(tmp_path)
    assert says in fault


def test_each_run_on_skypilot_has_a_bucket_of_its_own() -> None:
    text = (ROOT / "recipes/launch/skypilot/learner.yaml").read_text()
    usage = "\n".join(re.findall(r"^#   (.*)", text, re.MULTILINE))
    stand_ins = 'ssh() { echo "diloco://10.0.0.1:7654,b:1/run-3f#to/k#en,00"; }; sky() { printf "%s\n" "$@"; }'
    told = subprocess.run(["bash", "-euc", f"{stand_ins}\n{usage}"], capture_output=True, text=True, check=True).stdout
    assert "--env\nRUN=run-3f\n" in told
    task = yaml.safe_load(text)
    assert task["envs"]["RUN"] is None, "a job without it is refused"
    assert task["file_mounts"]["/files"]["name"] == "diloco-${RUN}"


def test_kubernetes_restarts_no_process_for_which_a_restart_does_not_help() -> None:
    folder = ROOT / "recipes/launch/jobset"
    (learner,) = yaml.safe_load_all((folder / "learner.yaml").read_text())
    (policy,) = learner["spec"]["failurePolicy"]["rules"]
    assert (policy["action"], policy["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    syncer = [part for part in yaml.safe_load_all((folder / "syncer.yaml").read_text()) if part["kind"] == "Job"]
    for job in (syncer[0], learner["spec"]["replicatedJobs"][0]["template"]):
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        first = job["spec"]["podFailurePolicy"]["rules"][0]
        codes = {"containerName": container["name"], "operator": "In", "values": [2]}
        assert (first["action"], first["onExitCodes"], pod["restartPolicy"]) == ("FailJob", codes, "Never")


def test_the_files_are_not_listed_as_recipes() -> None:
    assert not [recipe.name for recipe in recipes.find() if recipe.name.startswith("launch")]


@pytest.mark.parametrize(
    ("join", "words", "says"),
    [
        (None, ("tiny/gpt",), "DILOCO_JOIN is not set"),
        ("nonsense", ("tiny/gpt",), "must be diloco://"),
        ("diloco://a:1/r#token," + "0" * 64, ("tiny/gtp",), "nearest: tiny/gpt"),
        ("diloco://a:1/r#token," + "0" * 64, ("tiny/gpt", "--local", "2"), "--local: unknown"),
    ],
)
def test_fit_refuses_wrong_configurations(
    join: str | None,
    words: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("DILOCO_JOIN", raising=False)
    if join is not None:
        monkeypatch.setenv("DILOCO_JOIN", join)
    assert main(["fit", *words]) == 2
    assert says in capsys.readouterr().err
