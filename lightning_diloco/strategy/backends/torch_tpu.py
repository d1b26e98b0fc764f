"""Ranks on chips of TorchTPU (`torch_tpu`), which makes TPUs ordinary devices of torch.

This file and `TorchTPUAccelerator` have all that this package knows about torch_tpu, and only this file calls it. They
were written from the wheel of version 0.2. They are unmeasured: they have run on a stand-in only, never on a TPU.

1. A process has one chip, which is `tpu:0` there. TPU_VISIBLE_CHIPS limits the chips of a host that are used.
2. A chip belongs to the process that uses it first. The process that starts the ranks of a learner uses none, so it has
   no rank itself.
3. Ranks need variables that are the same for all of them when they start. `set_tpu_launch_env` of torch_tpu sets them.
   It needs no chip, and a process that was started without them aborts.
4. Functions of `torch.tpu` that have a counterpart in `torch.accelerator` raise if they are called outside of torch.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from typing_extensions import override

from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.backends.launchers import PATIENCE_S, WATCH_S, Scripts

log = logging.getLogger(__name__)

NEEDED = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY")
_INSTALLED = 'install it: pip install "lightning-diloco[torch_tpu]", on a TPU VM'


class ChipScripts(Scripts):
    """Starts the script once for each chip, waits for these ranks, and ends as they do (rule 2).

    If the ranks are started in another way (torchrun), the function is called in this process.

    Args:
        strategy: the learner's strategy.

    Raises:
        ConfigError: the user wants ranks to be started without their script.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        if (method := getattr(strategy, "_start_method", "popen")) != "popen":
            raise ConfigError(
                f"inner with start_method={method!r} on tpu: must be 'popen', because the process that starts the "
                "ranks must not use a chip; leave start_method out"
            )

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """See Lightning's `launch`. It does not return in the process that starts the ranks.

        Raises:
            SystemExit: all ranks have ended; with the code of the first of them that has failed.
            ConfigError: ranks cannot be started here.
        """
        if self.cluster_environment.creates_processes_externally:
            _check_launch_env()
            return super().launch(function, *args, trainer=trainer, **kwargs)
        if trainer is not None:
            self._strategy._separate_paths(trainer)
        _set_launch_env(self.num_processes, self.num_nodes)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, self._pass_on)
        self._call_children_scripts()
        raise SystemExit(_code_of(self.procs))

    @override
    def _call_children_scripts(self) -> None:
        environment = self.cluster_environment
        first = environment.node_rank() * self.num_processes
        shared = {
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
            "NODE_RANK": str(environment.node_rank()),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
        }
        if (learner := self._strategy._learner.learner) is not None:
            shared["DILOCO_LEARNER"] = learner
        # In Kubernetes, Lightning would take a process that has RANK for one that Kubeflow has started.
        inherited = {name: value for name, value in os.environ.items() if name != "KUBERNETES_PORT"}
        for local_rank in range(self.num_processes):
            own = {"LOCAL_RANK": str(local_rank), "RANK": str(first + local_rank)}
            self.procs.append(subprocess.Popen(_basic_subprocess_cmd(), env={**inherited, **shared, **own}))

    def _pass_on(self, signum: int, _: FrameType | None) -> None:
        self.kill(signum)  # type: ignore[arg-type]


def _set_launch_env(num_processes: int, num_nodes: int) -> None:
    """Set the variables that ranks need (rule 3); the user's own values stay.

    Raises:
        ConfigError: torch_tpu is not installed, or cannot arrange so many chips.
    """
    try:
        from torch.tpu.distributed import set_tpu_launch_env
    except ImportError as error:
        raise ConfigError(f"several chips of TorchTPU need the package torch_tpu ({error}); {_INSTALLED}") from error
    try:
        set_tpu_launch_env(nnodes=num_nodes if num_nodes > 1 else None, nproc_per_node=num_processes)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{num_processes} chip(s) on each of {num_nodes} host(s): torch_tpu cannot start such ranks ({error}); "
            "change Trainer(devices=..., num_nodes=...)"
        ) from error


def _check_launch_env() -> None:
    """Check that the launcher of this rank has set the variables that it needs.

    Raises:
        ConfigError: variables are missing.
    """
    if missing := [name for name in NEEDED if name not in os.environ]:
        raise ConfigError(
            f"this process was started as a rank without {' and '.join(missing)}, which chips need before it starts; "
            "export what `python -m torch.tpu.distributed` prints, then start the ranks again; or start the script "
            "once, without torchrun"
        )


def _code_of(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for the ranks; return 0, or the code of the first that fails. The others then have PATIENCE_S to end."""
    while not any(rank.poll() for rank in ranks):
        if all(rank.returncode == 0 for rank in ranks):
            return 0
        time.sleep(WATCH_S)
    failed = next(rank for rank in ranks if rank.returncode)
    until_s = time.monotonic() + PATIENCE_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < until_s:
        time.sleep(WATCH_S)
    for rank in ranks:
        rank.kill()
        rank.wait()
    codes = {rank.pid: rank.returncode for rank in ranks}
    log.info("the ranks of this learner have ended (exit codes by process: %s)", codes)
    return failed.returncode if failed.returncode > 0 else 128 - failed.returncode
