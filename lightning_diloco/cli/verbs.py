"""Adds a verb to `diloco` with its one-sentence description."""

from __future__ import annotations

import argparse
from typing import Any


def add_verb(
    verbs: Any, name: str, about: str, example: str, *, detail: str = "", usage: str | None = None
) -> argparse.ArgumentParser:
    """Add a verb.

    Args:
        verbs: the result of `add_subparsers`.
        name: name of the verb.
        about: description, without capital and full stop.
        example: examples, shown at the end of its help.
        detail: text after `about` in its own help.
        usage: usage line, in place of argparse's own.
    """
    description = f"{about[0].upper()}{about[1:]}{detail}."
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=about, description=description, epilog=example, usage=usage
    )
    return parser
