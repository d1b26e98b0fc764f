"""`diloco fit`: trains as one learner of a run with a syncer elsewhere. Engines start and restart this command.

1. DILOCO_JOIN names the run, and DILOCO_LEARNER names the learner. The command replaces itself with the learner's
   process (exec), so signals reach the learner, and the exit code is the learner's.
2. Exit codes: 0 the learner has finished, or the run is over; 2 a restart would not help, because the configuration,
   the model or the secret is wrong, or the id is taken; 143 the learner left cleanly after SIGTERM; 1 it failed, or
   left before all of its work was merged. After 143 and all other codes, the command can be started again.
3. A recipe's process is `python -m lightning_diloco.cli.fit [--local N] RECIPE.yaml [overrides]`; N is the number of
   learners on this machine. `diloco run` starts this process, too.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from lightning_diloco.cli import recipes
from lightning_diloco.cli.local.collector import kept
from lightning_diloco.cli.text.printable import printable
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.errors import AuthError, ConfigError, FencedError, PlanMismatchError

_EXAMPLE = """examples:
  DILOCO_JOIN=$(cat join) DILOCO_LEARNER=site-a diloco fit llama/1b
  DILOCO_JOIN=$(cat join) diloco fit train.py -- --epochs 3"""
_HERE = "--local"


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "train as one learner of the run in DILOCO_JOIN; engines start and restart this command"
    usage = "diloco fit RECIPE.yaml|SCRIPT.py [--] [overrides or script arguments]"
    parser = add_verb(verbs, "fit", about, _EXAMPLE, usage=usage)
    parser.add_argument("target", metavar="RECIPE|SCRIPT", help="a YAML recipe (see `diloco ls`) or a Python script")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Replace this process with the learner's."""
    from lightning_diloco.cli.run import learner_argv
    from lightning_diloco.cli.text.spelling import of_recipe, of_script
    from lightning_diloco.transport.address import JoinAddress

    target = recipes.resolve(arguments.target)
    if "DILOCO_JOIN" not in os.environ:
        raise ConfigError(
            "DILOCO_JOIN is not set; it is the content of RUN_DIR/join of a syncer. To train on this machine alone: "
            f"diloco run {arguments.target} --local 1"
        )
    JoinAddress.parse(os.environ["DILOCO_JOIN"])
    if problems := (of_script if target.suffix == ".py" else of_recipe)(arguments):
        raise ConfigError(problems)
    argv = learner_argv(target, arguments.passed_on, 1)
    sys.stdout.flush()
    os.execv(argv[0], argv)


def main() -> int:
    """Fit a recipe; returns the exit code."""
    with kept():
        from lightning_diloco.cli.fitting import Fit, cli_arguments
    # sys.argv is left unchanged, because Lightning starts the other ranks of a learner with it.
    words = sys.argv[1:]
    num_here, words = (int(words[1]), words[2:]) if words[0] == _HERE else (1, words)
    try:
        Fit(Path(words[0]), num_here, cli_arguments(words, os.environ))
    except (ConfigError, PlanMismatchError, AuthError, FencedError) as error:
        print(f"diloco: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
