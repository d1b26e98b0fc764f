"""`diloco`: finds the verb, runs it, and turns errors into one clean block on stderr.

1. Exit codes: 0 done; 1 it failed, and may work when tried again; 2 it was asked for wrongly, or refused; 130 Ctrl-C.
2. Nothing heavy is imported before a verb needs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from lightning_diloco.cli import chaos, cp, export, ls, plan, plot, replay, run, snapshot, status, syncer
from lightning_diloco.errors import DiLoCoError, StorageError

_EXAMPLE = "example:\n  diloco run recipes/tiny/gpt.yaml --local 2"


def build_parser() -> argparse.ArgumentParser:
    """The parser of `diloco` with one sub-parser per verb."""
    parser = _Parser(prog="diloco", description="Decoupled DiLoCo for PyTorch Lightning.", epilog=_EXAMPLE)
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb in (run, chaos, replay, snapshot, plan, plot, export, syncer, status, ls, cp):
        verb.add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: that of this process); returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    splitting = {"run": run.split, "chaos": chaos.split}.get(words[0])
    words, passed_on = splitting(words) if splitting else (words, [])
    try:
        arguments = build_parser().parse_args(words, argparse.Namespace(passed_on=passed_on))
        return int(arguments.call(arguments))
    except KeyboardInterrupt:
        return 130
    except DiLoCoError as error:
        print(f"diloco: {error}", file=sys.stderr)
        return 1 if isinstance(error, StorageError) else 2


class _Parser(argparse.ArgumentParser):
    """Keeps the line breaks of examples; options cannot be abbreviated, so that new ones break no script."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)


if __name__ == "__main__":
    sys.exit(main())
