"""`diloco export`: a run's anchor as a transformers folder and a Lightning checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_diloco.cli.collector import kept
from lightning_diloco.cli.verbs import add_verb

_EXAMPLE = """example:
  diloco export runs/mine --to my-model
  python -c "from transformers import AutoModelForCausalLM as M; print(M.from_pretrained('my-model'))\""""


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "write the anchor of a stopped run as a transformers folder and a Lightning checkpoint"
    parser = add_verb(verbs, "export", about, _EXAMPLE)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="of a run that is finished or stopped")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="where to write; new or empty")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="YAML",
        help="what the run trained (default: a learner's config.yaml in RUN_DIR)",
    )
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Write, and say what and where."""
    with kept():
        from lightning_diloco.hf.export import CHECKPOINT, export
    done = export(arguments.run_dir, arguments.to, config=arguments.config)
    low, high = min(done.versions), max(done.versions)
    print(
        f"anchor of {arguments.run_dir}: versions {low}..{high} of {len(done.versions)} fragments; model: {done.config}"
    )
    if done.is_transformers:
        print(f"transformers folder: {done.folder}{'' if done.has_tokenizer else ' (without a tokenizer)'}")
    print(f"Lightning checkpoint: {done.folder / CHECKPOINT}")
    return 0
