"""`diloco syncer`: serves a run from this machine.

Every option of `RunConfig` is a flag. Only explicit flags are passed on, without checks. The syncer, which knows the
manifest, reports all problems at once.
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

_EXPECT = "delay the first step until N learners are ready, and end when N have finished (default: stay open)"
_SHARDS = "share the fragments among S processes, on ports PORT, PORT+1, ... (default: as before, else 1)"
_EXAMPLE = "example:\n  diloco syncer --run-dir runs/mine --listen 0.0.0.0:7654 --expect 4 --sync-every 96"
NO_WANDB = "--wandb {project}: wandb is not installed; pip install 'lightning-diloco[wandb]'"
_DEFAULT_LISTEN = "127.0.0.1:0"
_RUN_OPTIONS = tuple(field.name for field in dataclasses.fields(RunConfig))


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "serve a run; learners join it with the join string in RUN_DIR/join"
    parser = add_verb(verbs, "syncer", about, _EXAMPLE)
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="run directory; created if missing")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help=f"default: the address in DIR/join, else {_DEFAULT_LISTEN}"
    )
    parser.add_argument("--expect", type=int, metavar="N", help=_EXPECT)
    parser.add_argument(
        "--embedded-by", type=int, metavar="PID", help="learner that started this; end soon after the last learner"
    )
    parser.add_argument(
        "--standby-of", metavar="JOIN", help="follow the syncer of this RUN_DIR/standby (a file, or its content)"
    )
    parser.add_argument(
        "--take-over", action="store_true", help="serve the run of a standby now; its primary must be lost"
    )
    parser.add_argument("--shards", type=int, metavar="S", help=_SHARDS)
    parser.add_argument("--elsewhere", action="store_true", help="the other shards run on other machines; see --shard")
    parser.add_argument("--shard", metavar="K/S", help="serve shard K of a run with S shards; needs --of")
    parser.add_argument("--of", metavar="JOIN", help="RUN_DIR/standby of the syncer (a file, or its content)")
    parser.add_argument("--reseed", action="store_true", help="open an empty directory although learners know the run")
    parser.add_argument("--record", choices=["contributions"], help="also store received contributions, for replay")
    parser.add_argument("--wandb", metavar="PROJECT", help="log the run to Weights & Biases; see diloco run --wandb")
    options = parser.add_argument_group(
        "options of the run", "these flags take precedence over the options of the seeding learner"
    )
    explained = _explanations()
    for name in _RUN_OPTIONS:
        flag = "--" + name.replace("_", "-")
        options.add_argument(flag, type=_value, default=argparse.SUPPRESS, metavar="X", help=explained[name])
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Serve until the run is finished; returns the exit code."""
    if arguments.expect is not None and arguments.expect < 1:
        raise ConfigError(f"--expect {arguments.expect}: must be at least 1; without it, the run stays open")
    with kept():
        from lightning_diloco.syncer.process import SyncerOptions, serve
        from lightning_diloco.syncer.shards.process import parsed_part, serve_elsewhere, serve_shard
        from lightning_diloco.syncer.standby.invitation import Invitation

    if arguments.shard is not None:
        part, listen = parsed_part(arguments.shard), arguments.listen or _DEFAULT_LISTEN
        if arguments.of is not None:
            return serve_elsewhere(arguments.run_dir, part, listen, Invitation.parse(arguments.of))
        if arguments.embedded_by is None:
            raise ConfigError(f"--shard {arguments.shard} needs --of: RUN_DIR/standby of the syncer, or a copy of it")
        return serve_shard(arguments.run_dir, part, listen, arguments.embedded_by)
    if arguments.of is not None:
        raise ConfigError("--of belongs to --shard K/S; to follow a syncer as its standby, use --standby-of")
    given = vars(arguments)
    options = SyncerOptions(
        run_dir=arguments.run_dir,
        listen=arguments.listen or _address_before(arguments.run_dir),
        expect=arguments.expect,
        embedded_by=arguments.embedded_by,
        run_options={name: given[name] for name in _RUN_OPTIONS if name in given},
        reseed=arguments.reseed,
        record_contributions=arguments.record == "contributions",
        standby_of=None if arguments.standby_of is None else Invitation.parse(arguments.standby_of),
        takes_over=arguments.take_over,
        num_shards=arguments.shards,
        shards_elsewhere=arguments.elsewhere,
    )
    with _tracked(arguments):
        return serve(options)


def _tracked(arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """Log the run to W&B during the block, if --wandb was given."""
    if arguments.wandb is None:
        return nullcontext()
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(NO_WANDB.format(project=arguments.wandb))
    from lightning_diloco.tracking.syncer import tracked

    return tracked(arguments.run_dir, arguments.wandb)


def _address_before(run_dir: Path) -> str:
    """Return the previous address of this run, which its learners still dial after a restart."""
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
    """Return the description of each option in the docstring of `RunConfig`."""
    text = " ".join((RunConfig.__doc__ or "").partition("Args:")[2].split())
    parts = re.split(rf"\b({'|'.join(_RUN_OPTIONS)}): ", text)[1:]
    return {name: said.strip().replace("%", "%%") for name, said in zip(parts[::2], parts[1::2], strict=True)}
