"""Runs the short benchmarks, or the named ones, one by one: `python tests/bench/run.py [names] [--out DIR]`.

exchange, straggler, participation, survivors (5 minutes), busy_survivors (5), wide_area (11), forecast (14) and fleets
(20, 24 GB of memory) need an idle machine with two cores, chaos (40) one with four. quality, loss_by_participation
(15), broken_learner (20), memory (5) and goodput_table (30) give the same results on any machine, loop (5),
syncer_round (3), at_size (5, 24 GB), shards (4, 24 GB), attacks (2) and ranks_step (14) nearly so. recoveries (6),
takeovers (8), simulated (13), speeds (30) and soak (53) sleep most of the time. streams (7) and peers (30) need root,
Linux and an idle machine. Unknown options are passed to all of them. bandwidth is arithmetic. xla_step needs torch_xla,
gpu needs a GPU; both are run separately.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHORT = ("exchange", "straggler", "participation", "quality", "loss_by_participation", "broken_learner")
NAMES = (
    *SHORT,
    "ranks_step",
    "speeds",
    "forecast",
    "memory",
    "loop",
    "fleets",
    "syncer_round",
    "goodput_table",
    "simulated",
    "at_size",
    "shards",
    "peers",
    "attacks",
    "streams",
    "wide_area",
    "bandwidth",
    "survivors",
    "busy_survivors",
    "recoveries",
    "takeovers",
    "soak",
    "chaos",
)


def main() -> int:
    """Run the benchmarks; return 1 if any of them missed a bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"from {', '.join(NAMES)}; default: the first {len(SHORT)}"
    )
    parser.add_argument("--out", type=Path, help="folder for results, one NAME.json each")
    args, passed_on = parser.parse_known_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(NAMES)}")
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)  # a benchmark that draws does so before it stores
    failed = []
    for name in args.names or SHORT:
        print(f"\n== {name} ==\n", flush=True)
        began_s = time.perf_counter()
        options = [*passed_on, *(["--out", str(args.out / f"{name}.json")] if args.out else [])]
        if importlib.import_module(f"tests.bench.{name}").main(options):
            failed.append(name)
        print(f"\n({time.perf_counter() - began_s:.0f} s)", flush=True)
    print(f"\nmissed a bound: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
