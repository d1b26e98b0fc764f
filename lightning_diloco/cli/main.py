"""`diloco`: runs a verb, and prints errors as one block on stderr.

1. Exit codes: 0 success; 1 failure, a retry may help; 2 wrong command line or refused request; 130 Ctrl-C; 141 the
   program that reads the output has closed the pipe (`diloco status RUN_DIR --json | head`).
2. Large libraries are imported only by the verbs that need them.
3. Unknown verbs and options are refused before anything starts. The message names the nearest known one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning_diloco import __version__
from lightning_diloco.cli import (
    chaos,
    cp,
    export,
    fit,
    ls,
    plan,
    plot,
    replay,
    rotate,
    run,
    simulate,
    snapshot,
    status,
    syncer,
)
from lightning_diloco.cli.ray import scale
from lightning_diloco.cli.sites import doctor, launch
from lightning_diloco.cli.text.printable import printable, reason
from lightning_diloco.cli.text.spelling import hint
from lightning_diloco.errors import DiLoCoError, StorageError

_EXAMPLE = "example:\n  diloco run recipes/tiny/gpt.yaml --local 2"
SPLITTING = {"run": run.split, "fit": partial(run.split, valued=(), flags=("-h", "--help")), "chaos": chaos.split}
_VERBS = (
    *(run, fit, syncer, status, scale, launch, doctor, plan, simulate),
    *(chaos, replay, snapshot, plot, export, rotate, ls, cp),
)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `diloco`, with one sub-parser per verb."""
    parser = _Parser(prog="diloco", description="Decoupled DiLoCo for PyTorch Lightning.", epilog=_EXAMPLE)
    parser.add_argument("--version", action="version", version=f"lightning-diloco {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb in _VERBS:
        verb.add_parser(verbs)
    for its_own in verbs.choices.values():
        its_own.set_defaults(options=tuple(its_own._option_string_actions))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of this process) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    num_words = len(words)
    splitting = SPLITTING.get(words[0])
    words, passed_on = splitting(words) if splitting else (words, [])
    try:
        is_divided = len(words) + len(passed_on) < num_words
        arguments = _parse(words, argparse.Namespace(passed_on=passed_on, is_divided=is_divided))
        exit_code = int(arguments.call(arguments))
        sys.stdout.flush()
        return exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        return 141
    except DiLoCoError as error:
        print(f"diloco: {printable(str(error))}", file=sys.stderr)
        return 1 if isinstance(error, StorageError) else 2
    except OSError as error:
        # An error without a path says nothing to the user. `diloco run` restarts a syncer unless it ends with code 2.
        if error.filename is None or words[0] == "syncer":
            raise
        said = f"{error.filename}: {reason(error)}; choose another path, or make this one readable and writable"
        print(f"diloco: {printable(said)}", file=sys.stderr)
        return 2


def _parse(words: Sequence[str], known: argparse.Namespace) -> argparse.Namespace:
    """Parse the command line; on an error, print it and exit with code 2."""
    parser = build_parser()
    names = [verb.__name__.rpartition(".")[2] for verb in _VERBS]
    if words[0] not in names and not words[0].startswith("-"):
        parser.error(f"no verb {words[0]!r}{hint(words[0], names)}; verbs: {', '.join(names)}")
    arguments, unknown = parser.parse_known_args(words, known)
    if unknown:
        options: Sequence[str] = arguments.options
        said = [f"{word}{hint(word, options)}" for word in unknown if word.startswith("-")] or unknown
        parser.error(f"{words[0]} takes no {', '.join(said)}; see `diloco {words[0]} --help`")
    return arguments


class _Parser(argparse.ArgumentParser):
    """Keeps line breaks in examples, and allows no abbreviated options, so that new options break no script."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)


if __name__ == "__main__":
    sys.exit(main())
