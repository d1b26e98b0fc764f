"""`diloco plot`: plots a run from its files, also while it trains."""

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
    about = "plot a run as PNG and SVG: timeline of the fleet, loss, goodput, versions, traffic"
    parser = add_verb(verbs, "plot", about, _EXAMPLE)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory, finished or not")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where to write (default: RUN_DIR/plots)")
    parser.add_argument("--cap", type=bits, metavar="RATE", help="draw a line at the syncer's link rate, such as 5Gbit")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Write the plots and print their paths."""
    from lightning_diloco.plots.story import read

    story = read(arguments.run_dir)
    try:
        from lightning_diloco.plots.pictures import draw_all
    except ImportError as error:
        raise ConfigError(f"{error}: plots need matplotlib; pip install 'lightning-diloco[plot]'") from error
    written = draw_all(story, arguments.to or arguments.run_dir / "plots", cap_bps=arguments.cap)
    for path in written:
        print(path)
    return 0
