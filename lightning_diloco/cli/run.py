"""`diloco run`: runs a recipe or a script with a syncer and N learners, on this machine or on a Ray cluster.

Options belong to `diloco run` up to `--`, or up to the first unknown option after the target. The rest is passed
unchanged to the recipe or the script. Options that no recipe takes, and misspelt options of `diloco run`, are refused
before anything starts. After `--`, a script's options may have any name.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_diloco.cli import page, recipes
from lightning_diloco.cli.local.claim import claimed
from lightning_diloco.cli.local.interruption import CTRL_C_GRACE_S, GRACE_S, Interruption
from lightning_diloco.cli.ray import options
from lightning_diloco.cli.syncer import NO_WANDB
from lightning_diloco.cli.text.printable import reason
from lightning_diloco.cli.text.spelling import of_recipe, of_script
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.errors import ConfigError
from lightning_diloco.process.exit import let_threads_become_idle
from lightning_diloco.storage.local_runs import last_summary

if TYPE_CHECKING:
    from lightning_diloco.cli.local.display import Screen
    from lightning_diloco.cli.local.run import Ended, Plan, Tell

_EXAMPLE = """examples:
  diloco run recipes/tiny/gpt.yaml --local 2 --trainer.max_steps 60
  diloco run recipes/tiny/gpt.yaml --local 2 --wandb my-project --page 127.0.0.1:8080
  diloco run train.py --local 4 --run-dir runs/mine -- --epochs 3
  diloco run gpt2/124m --engine ray --learners 4 --resources-per-learner '{"GPU": 1}' --run-dir /shared/mine"""
VALUED = ("--local", "--run-dir", "--max-restarts", "--threads", "--from")
FLAGS = ("--no-table", "-h", "--help")
_VALUED, _FLAGS = (*VALUED, *options.VALUED, "--shards", "--stop-grace", "--page", "--wandb"), (*FLAGS, "--no-page")
SHARDS = "processes that share the fragments of the model, the syncer and its shards (default: 1)"
_MAX_RESTARTS = 3
_WANDB = "lightning_diloco.tracking.Wandb"
_WANDB_HELP = "log learners and syncer to Weights & Biases as one group; a script logs its learners with a WandbLogger"
_SCRIPT_S_OWN = (
    "W&B: the script's own WandbLogger logs its learners to this group; without one, only the syncer is logged, "
    f"unless its Trainer has callbacks=[{_WANDB}(%r)]"
)


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "run a recipe or a script as N learners, on this machine or on a cluster"
    parser = add_verb(
        verbs,
        "run",
        about,
        _EXAMPLE,
        usage="diloco run RECIPE.yaml|SCRIPT.py --local N | --engine ray --learners N [options] [--] "
        "[overrides or script arguments]",
    )
    parser.add_argument("target", metavar="RECIPE|SCRIPT", help="a YAML recipe (see `diloco ls`) or a Python script")
    parser.add_argument("--local", type=int, metavar="N", help="number of learners on this machine")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/<name>-<UTC time>")
    parser.add_argument("--from", type=Path, dest="origin", metavar="DIR", help="continue from a `diloco snapshot`")
    restarts = f"per process (default: {_MAX_RESTARTS}; on a cluster: no limit)"
    parser.add_argument("--max-restarts", type=int, metavar="R", help=restarts)
    parser.add_argument("--threads", type=int, metavar="T", help="threads per learner (default: cores / N)")
    parser.add_argument("--shards", type=int, metavar="S", help=SHARDS)
    parser.add_argument(
        "--stop-grace",
        type=float,
        metavar="S",
        help=f"seconds that learners get after an interrupt (Ctrl-C: {CTRL_C_GRACE_S:g}, SIGTERM: {GRACE_S:g})",
    )
    parser.add_argument("--no-table", action="store_true", help="print plain lines even on a terminal")
    parser.add_argument("--page", default=page.LISTEN, metavar="HOST:PORT", help=page.HELP)
    parser.add_argument("--wandb", metavar="PROJECT", help=_WANDB_HELP)
    parser.add_argument("--no-page", action="store_true", help="do not serve the live page")
    options.add_options(parser)
    parser.set_defaults(call=call)


def split(
    words: Sequence[str], valued: Sequence[str] = _VALUED, flags: Sequence[str] = _FLAGS
) -> tuple[list[str], list[str]]:
    """Split a command line `VERB ...` into the words of `diloco` and the words that are passed on.

    Args:
        words: the whole command line, the verb first.
        valued: options of the verb that take a value.
        flags: options of the verb that take none.
    """
    num_positional, position = 0, 0
    while position < len(words):
        word = words[position]
        if word == "--":
            return list(words[:position]), list(words[position + 1 :])
        name, has_value, _ = word.partition("=")
        is_ours = name in valued or word in flags
        if not is_ours and num_positional == 2:  # the verb and the target
            break
        num_positional += not word.startswith("-")
        position += 2 if name in valued and not has_value else 1
    return list(words[:position]), list(words[position:])


def call(arguments: argparse.Namespace) -> int:
    """Run to the end and print the summary; returns the exit code."""
    found = problems(arguments) + options.problems(arguments)
    if arguments.stop_grace is not None and not arguments.stop_grace > 0.0:
        found.append(f"--stop-grace {arguments.stop_grace:g}: must be above 0")
    if found:
        raise ConfigError(found)
    target = recipes.resolve(arguments.target)
    _refuse_unusable(arguments, target)
    run_dir = make_run_dir(arguments.run_dir, target.stem)
    is_served = arguments.engine is not None and _is_left_alone(run_dir, arguments)
    if not is_served:
        _refuse_finished(run_dir)
    with claimed(run_dir, is_served=is_served):
        code = _run(arguments, target, run_dir, is_served=is_served)
    let_threads_become_idle()  # threads of the connection to the syncer can crash the shutdown of the interpreter
    return code


def _refuse_unusable(arguments: argparse.Namespace, target: Path) -> None:
    """Check wandb, the number of hosts, the page's address and the snapshot before anything is created."""
    _tracking(arguments.wandb, target)
    options.layout(arguments, target)
    if not arguments.no_page:
        from lightning_diloco.live.server import check_address

        check_address(arguments.page)
    if arguments.origin is not None:
        from lightning_diloco.syncer.run_snapshot import check_whole

        check_whole(arguments.origin)


def _refuse_finished(run_dir: Path) -> None:
    """Refuse a run directory whose run has finished.

    Raises:
        ConfigError: its learners have made their last step; a new run would train merged steps again.
    """
    summary = last_summary(run_dir)
    if summary is not None and summary["status"] == "finished":
        raise ConfigError(
            f"the run in {run_dir} has finished; `diloco status {run_dir}` shows its summary. To train anew, choose "
            "another --run-dir. To use its model, see `diloco export` and lightning_diloco.load_anchor"
        )


def _is_left_alone(run_dir: Path, arguments: argparse.Namespace) -> bool:
    from lightning_diloco.cli.ray.files import left_alone

    if (wants := left_alone(run_dir)) is None:
        return False
    if wants.num_learners != arguments.learners:
        raise ConfigError(
            f"--learners {arguments.learners}: the run in {run_dir} goes on with {wants.num_learners} learner(s) "
            f"although its `diloco run` was killed; take it over with --learners {wants.num_learners}, then use "
            "`diloco scale`"
        )
    if wants.num_hosts != (given := arguments.hosts_per_learner or 1):
        raise ConfigError(
            f"--hosts-per-learner {given}: the run in {run_dir} goes on with {wants.num_hosts} host(s) per learner "
            f"although its `diloco run` was killed; take it over with --hosts-per-learner {wants.num_hosts}"
        )
    return True


def _run(arguments: argparse.Namespace, target: Path, run_dir: Path, *, is_served: bool) -> int:
    from rich.console import Console

    from lightning_diloco.cli.local.display import Screen, summary_view
    from lightning_diloco.cli.local.run import Plan

    tracking, tell = _tracking(arguments.wandb, target)
    if arguments.origin is not None:
        from lightning_diloco.syncer.run_snapshot import begin_from

        begin_from(arguments.origin, run_dir)
    num_learners = arguments.local or arguments.learners
    needs = options.needs(arguments.resources_per_learner)
    is_elsewhere = arguments.engine is not None
    listen = ["--listen", "0.0.0.0:0" if arguments.address else "127.0.0.1:0"] if is_elsewhere else []
    wandb = ["--wandb", arguments.wandb] if arguments.wandb else []
    num_here = 1 if arguments.address else num_learners
    plan = Plan(
        run_dir=run_dir,
        syncer_argv=(*syncer_argv(run_dir, num_learners, arguments.shards), *listen, *wandb),
        learner_argv=learner_argv(
            target, [*tracking, *arguments.passed_on, *options.layout(arguments, target)], num_here
        ),
        num_learners=num_learners,
        threads=arguments.threads or (max(1, int(needs["CPU"])) if is_elsewhere else None),
        max_restarts=_MAX_RESTARTS if arguments.max_restarts is None and not is_elsewhere else arguments.max_restarts,
        grace_s=arguments.stop_grace,
        tell=tell,
        is_served=is_served,
    )
    console = Console()
    live = console.is_terminal and not arguments.no_table
    say = partial(console.print, soft_wrap=True, highlight=False, markup=False)
    show_page = nullcontext() if arguments.no_page else page.served(run_dir, arguments.page, say)
    with Interruption() as interruption:
        with show_page as watch:
            with Screen(console, live=live, watch=watch) as screen:
                screen.say(f"run directory: {run_dir}  (each process logs to log.txt in its folder there)")
                if tell is not None:
                    screen.say(_SCRIPT_S_OWN % arguments.wandb)
                ended = _ended(arguments, plan, target, screen, interruption)
            if watch is not None and ended.summary is not None:
                watch.ended(ended.summary)
        console.print(summary_view(ended.summary, run_dir) if ended.summary else f"no summary; files: {run_dir}")
    return ended.exit_code


def _ended(
    arguments: argparse.Namespace, plan: Plan, target: Path, screen: Screen, interruption: Interruption
) -> Ended:
    if arguments.engine is None:
        from lightning_diloco.cli.local.run import execute

        return execute(plan, screen, interruption)
    from lightning_diloco.cli.ray.run import execute_on_ray

    asked = {"needs": options.needs(arguments.resources_per_learner), "num_hosts": arguments.hosts_per_learner or 1}
    return execute_on_ray(plan, target.resolve(), screen, interruption, address=arguments.address, **asked)


def _tracking(project: str | None, target: Path) -> tuple[list[str], Tell | None]:
    """Return a recipe's arguments, or a script's environment, that make learners log to this W&B project."""
    if project is None:
        return [], None
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(NO_WANDB.format(project=project))
    if target.suffix == ".py":
        from lightning_diloco.tracking.script import environment

        return [], partial(environment, project)
    return [f"--trainer.callbacks+={_WANDB}", f"--trainer.callbacks.project={project}"], None


def problems(arguments: argparse.Namespace) -> list[str]:
    """Return problems with the options of local runs; some verbs have only some of them."""
    found = []
    if arguments.local is None and getattr(arguments, "engine", None) is None:
        swallowed = any(word.partition("=")[0] == "--local" for word in arguments.passed_on)
        hint = "put it before the options that are passed on" if swallowed else "for example --local 2"
        found.append(f"--local N is missing: pass the number of learners; {hint}")
    for name, minimum in (("local", 1), ("max_restarts", 0), ("threads", 1), ("shards", 1)):
        value = getattr(arguments, name, None)
        if value is not None and value < minimum:
            found.append(f"--{name.replace('_', '-')} {value}: must be at least {minimum}")
    misspelt = of_script if arguments.target.endswith(".py") else of_recipe
    return found + misspelt(arguments)


def make_run_dir(wanted: Path | None, stem: str) -> Path:
    """Return the wanted folder, else a new one under runs/; it is created if missing."""
    stamp = f"{stem}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    names = (stamp if attempt == 1 else f"{stamp}-{attempt}" for attempt in itertools.count(1))
    run_dir = wanted or next(path for name in names if not (path := Path("runs") / name).exists())
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run directory {run_dir}: {reason(error)}; choose a folder with --run-dir") from error
    return run_dir.resolve()


def syncer_argv(run_dir: Path, num_learners: int, num_shards: int | None = None) -> tuple[str, ...]:
    """Return the command of the syncer of a local run."""
    count = str(num_learners)
    module = (sys.executable, "-m", "lightning_diloco.cli.main", "syncer")
    shards = () if num_shards is None else ("--shards", str(num_shards))
    return (*module, "--run-dir", str(run_dir), "--expect", count, "--data-parts", count, *shards)


def learner_argv(target: Path, passed_on: Sequence[str], num_learners: int) -> tuple[str, ...]:
    """Return the command of each of `num_learners` learners of a recipe or script."""
    if target.suffix == ".py":
        return (sys.executable, str(target), *passed_on)
    module = (sys.executable, "-m", "lightning_diloco.cli.fit")
    return (*module, "--local", str(num_learners), str(target), *passed_on)
