"""`diloco export`: exports the anchor as a transformers folder and a Lightning checkpoint, or as parameters."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_diloco.cli.local.collector import kept
from lightning_diloco.cli.verbs import add_verb

_EXAMPLE = """example:
  diloco export runs/mine --to my-model
  python -c "from transformers import AutoModelForCausalLM as M; print(M.from_pretrained('my-model'))\""""


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "write the anchor of a stopped run as a transformers folder and a Lightning checkpoint, or its parameters"
    parser = add_verb(verbs, "export", about, _EXAMPLE)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory of a finished or stopped run")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="where to write; new or empty")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="YAML",
        help="config of the trained model (default: a learner's config.yaml in RUN_DIR; a script writes none)",
    )
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Write the files and print their paths."""
    with kept():
        from lightning_diloco.hf.export import CHECKPOINT, PARAMETERS, export
    done = export(arguments.run_dir, arguments.to, config=arguments.config)
    low, high = min(done.versions), max(done.versions)
    what = f"anchor of {arguments.run_dir}: versions {low}..{high} of {len(done.versions)} fragments"
    if done.config is None:
        print(f"{what}; no config of the model, because a script saves none; pass one with --config")
        print(f"parameters by name: {done.folder / PARAMETERS}")
        print(f"in Python: lightning_diloco.load_anchor({str(arguments.run_dir)!r}, module)")
        return 0
    print(f"{what}; model: {done.config}")
    if done.is_transformers:
        print(f"transformers folder: {done.folder}{'' if done.has_tokenizer else ' (without a tokenizer)'}")
    print(f"Lightning checkpoint: {done.folder / CHECKPOINT}")
    return 0
