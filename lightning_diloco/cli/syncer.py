"""`diloco syncer`: serve a run from this machine.

Every option of `RunConfig` is a flag. Only those given are passed on, and unchecked: the syncer knows the manifest,
and reports all that is wrong at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from lightning_diloco.cli.local.collector import kept
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.config import RunConfig
from lightning_diloco.errors import ConfigError

_EXAMPLE = "example:\n  diloco syncer --run-dir runs/mine --listen 0.0.0.0:7654 --expect 4 --sync-every 96"
NO_WANDB = "--wandb {project}: wandb is not installed, and is needed; pip install 'lightning-diloco[wandb]'"
_DEFAULT_LISTEN = "127.0.0.1:0"
_RUN_OPTIONS = tuple(field.name for field in dataclasses.fields(RunConfig))


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "serve a run; learners join it with the join string in RUN_DIR/join"
    parser = add_verb(verbs, "syncer", about, _EXAMPLE)
    parser.add_argument(
        "--run-dir", type=Path, required=True, metavar="DIR", help="where the run lives; made if missing"
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help=f"default: the address in DIR/join, else {_DEFAULT_LISTEN}"
    )
    parser.add_argument("--expect", type=int, metavar="N", help="hold the first step until N learners are ready")
    parser.add_argument(
        "--embedded-by", type=int, metavar="PID", help="a learner started this; end soon after the last"
    )
    parser.add_argument("--reseed", action="store_true", help="open although learners know the lost run as non-empty")
    parser.add_argument("--record", choices=["contributions"], help="also keep the received bytes, for replay")
    parser.add_argument("--wandb", metavar="PROJECT", help="log the run to Weights & Biases; see diloco run --wandb")
    options = parser.add_argument_group(
        "options of the run", "fixed by whoever comes first: these flags, the seeding learner"
    )
    explained = _explanations()
    for name in _RUN_OPTIONS:
        flag = "--" + name.replace("_", "-")
        options.add_argument(flag, type=_value, default=argparse.SUPPRESS, metavar="X", help=explained[name])
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Serve until the run is finished; returns the exit code."""
    with kept():
        from lightning_diloco.syncer.process import SyncerOptions, serve

    given = vars(arguments)
    options = SyncerOptions(
        run_dir=arguments.run_dir,
        listen=arguments.listen or _address_before(arguments.run_dir),
        expect=arguments.expect,
        embedded_by=arguments.embedded_by,
        run_options={name: given[name] for name in _RUN_OPTIONS if name in given},
        reseed=arguments.reseed,
        record_contributions=arguments.record == "contributions",
    )
    with _tracked(arguments):
        return serve(options)


def _tracked(arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """Logs the run to W&B while the block lasts, if that was asked for."""
    if arguments.wandb is None:
        return nullcontext()
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(NO_WANDB.format(project=arguments.wandb))
    from lightning_diloco.tracking.syncer import tracked

    return tracked(arguments.run_dir, arguments.wandb)


def _address_before(run_dir: Path) -> str:
    """Where this run was served before: its learners still dial that after a restart."""
    from lightning_diloco.transport.address import read_join_file

    join = run_dir / "join"
    return read_join_file(join).host_port if join.exists() else _DEFAULT_LISTEN


def _value(text: str) -> int | float | str:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _explanations() -> dict[str, str]:
    """What `RunConfig` says of each of its options."""
    text = " ".join((RunConfig.__doc__ or "").partition("Args:")[2].split())
    parts = re.split(rf"\b({'|'.join(_RUN_OPTIONS)}): ", text)[1:]
    return {name: said.strip().replace("%", "%%") for name, said in zip(parts[::2], parts[1::2], strict=True)}
