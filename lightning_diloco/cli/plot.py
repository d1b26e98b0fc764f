"""`diloco plot`: pictures of a run from what it left behind, or has written so far."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_diloco.cli.text.quantities import bits
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.errors import ConfigError

_EXAMPLE = "example:\n  diloco plot runs/mine --to pictures --cap 5Gbit"


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "draw a run: timeline of the fleet, loss, goodput, versions, traffic; PNG and SVG"
    parser = add_verb(verbs, "plot", about, _EXAMPLE)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="of a run, finished or not")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where to write (default: RUN_DIR/plots)")
    parser.add_argument("--cap", type=bits, metavar="RATE", help="of the syncer's link, such as 5Gbit: drawn as a line")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Write the pictures and say where."""
    from lightning_diloco.plots.story import read

    story = read(arguments.run_dir)
    try:
        from lightning_diloco.plots.pictures import draw_all
    except ImportError as error:
        raise ConfigError(
            f"{error}: pictures are drawn with matplotlib; pip install 'lightning-diloco[plot]'"
        ) from error
    written = draw_all(story, arguments.to or arguments.run_dir / "plots", cap_bps=arguments.cap)
    for path in written:
        print(path)
    return 0
