"""How every verb of `diloco` introduces itself: one sentence in the list of verbs and above its own options."""

from __future__ import annotations

import argparse
from typing import Any


def add_verb(
    verbs: Any, name: str, about: str, example: str, *, detail: str = "", usage: str | None = None
) -> argparse.ArgumentParser:
    """Add a verb.

    Args:
        verbs: what `add_subparsers` returned.
        name: of the verb.
        about: what it does, without capital and full stop.
        example: ends its help.
        detail: what its own help says after `about`.
        usage: in place of what argparse makes of the options.
    """
    description = f"{about[0].upper()}{about[1:]}{detail}."
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=about, description=description, epilog=example, usage=usage
    )
    return parser
