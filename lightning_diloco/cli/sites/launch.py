"""`diloco launch`: writes the files with which SLURM, SkyPilot, Kubernetes or ssh start a syncer and learners.

1. The files are those of `recipes/launch/ENGINE`, which work as they are. A line that ends with `# set: FIELD` gets the
   recipe's own value instead of the one before the comment.
2. The syncer's cores and memory are those that `diloco plan` computes for the recipe. A script keeps the values of the
   files, because it cannot be read without running it.
3. Learners that train on a CPU get no line with devices.
4. A recipe or script that is not part of the package, which is on all machines, is copied to the folder `recipe` beside
   the files, and each engine takes this folder to its learners. In the name of the copy, other characters than letters,
   digits, '.', '_' and '-' become '-', because shells, YAML and keys of a ConfigMap read them in different ways.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_diloco.cli import recipes
from lightning_diloco.cli.plan import forecast_of
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.errors import ConfigError

_EXAMPLE = """examples:
  diloco launch gpt2/124m --engine slurm --learners 4 --to mine
  diloco launch llama/1b --engine skypilot --learners 8 --to mine"""
ENGINES = ("slurm", "skypilot", "jobset", "ssh")
_FIELD = re.compile(r"(.*?)  # set: (\w+)")
_NUMBER, _WORD = r"\d+(?=\D*$)", r"[^\s=:]+$"
_OWN = "recipe"  # folder of a recipe that is not part of the package
_PROCESS_GIB = 2  # Python, torch and compiled loops


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "write the files with which SLURM, SkyPilot, Kubernetes (JobSet) or ssh start a run's syncer and learners"
    parser = add_verb(verbs, "launch", about, _EXAMPLE)
    parser.add_argument("target", metavar="RECIPE|SCRIPT", help="a YAML recipe (see `diloco ls`) or a Python script")
    parser.add_argument("--engine", required=True, choices=ENGINES, help="what starts them")
    parser.add_argument("--learners", type=int, required=True, metavar="N", help="number of learners")
    parser.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="folder of the files; none is overwritten"
    )
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Write all files or none, and print how to use them."""
    if arguments.learners < 1:
        raise ConfigError(f"--learners {arguments.learners}: must be at least 1")
    path = recipes.resolve(arguments.target)
    own = _own(arguments.target, path)
    values: dict[str, int | str | None] = {
        "recipe": f"{_OWN}/{own[path]}" if own else arguments.target,
        "folder": _OWN if own else None,
        "learners": arguments.learners,
        "last": arguments.learners - 1,
    }
    if path.suffix != ".py":
        values |= _machines(path, arguments.learners)
    sources = sorted(_folder(arguments.engine).iterdir(), reverse=True)  # the syncer first
    targets = {source: arguments.to / source.name for source in sources}
    targets |= {source: arguments.to / _OWN / name for source, name in own.items()}
    if taken := [str(target) for target in targets.values() if target.exists()]:
        raise ConfigError(f"{', '.join(taken)} already exists; choose another folder with --to, or remove it first")
    arguments.to.mkdir(parents=True, exist_ok=True)
    if own:
        (arguments.to / _OWN).mkdir(exist_ok=True)
    for source in own:
        shutil.copyfile(source, targets[source])
    for source in sources:
        text = filled(source.read_text(encoding="utf-8"), values)
        targets[source].write_text(text, encoding="utf-8")
        targets[source].chmod(source.stat().st_mode & 0o777)
        print(f"{targets[source]}\n{_usage(text)}")
    return 0


def filled(text: str, values: Mapping[str, int | str | None]) -> str:
    """Return the text of a file with these values in its fields; a line whose value is None is left out."""
    lines = []
    for line in text.splitlines():
        if not (found := _FIELD.fullmatch(line)):
            lines.append(line)
        elif (value := values.get(found[2], "")) is not None:
            pattern = _NUMBER if isinstance(value, int) else _WORD
            lines.append(re.sub(pattern, lambda before: str(value) or before[0], found[1]))
    return "\n".join(lines) + "\n"


def _own(target: str, path: Path) -> dict[Path, str]:
    """Return the names under which the files of a recipe are copied; none if it is part of the package."""
    roots = recipes.roots()
    if not Path(target).is_file() and any(path.is_relative_to(root) for root in (roots[0], roots[-1])):
        return {}
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", path.name)
    return {path: safe, **{module: module.name for module in recipes.modules_beside(path)}}


def _folder(engine: str) -> Path:
    return next(folder for root in recipes.roots() if (folder := root / recipes.LAUNCH / engine).is_dir())


def _machines(path: Path, num_learners: int) -> dict[str, int | None]:
    """Return the devices of a learner, and the syncer's cores and memory."""
    drawn, found = forecast_of(path, {"num_learners": num_learners})
    if drawn.accelerator in ("tpu", "xla", "torch_tpu"):
        raise ConfigError(f"{path} trains on TPUs, whose machines differ too much for a template; see recipes/tpus.md")
    return {
        "devices": None if drawn.accelerator == "cpu" else drawn.devices or 1,
        "syncer_cores": found.scenario.fleet.syncer_cores,
        "syncer_memory": math.ceil(sum(found.syncer.values()) / (1 << 30)) + _PROCESS_GIB,
    }


def _usage(text: str) -> str:
    """Return the comment at the start of a file, indented."""
    lines = text.removeprefix("#!/bin/bash\n").splitlines()
    about = [line for k, line in enumerate(lines) if all(earlier.startswith("# ") for earlier in lines[: k + 1])]
    return "\n".join(f"  {line.removeprefix('# ')}" for line in about)
