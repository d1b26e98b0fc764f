"""The actor that Ray places for each process of a run. It starts the keeper of the process on its node.

1. The keeper outlives the actor (keeper.py). Ray starts the actor again elsewhere when its node is lost; the new actor
   starts a new keeper, and an older one leaves.
2. The actor holds a pipe whose other end only the keeper has. The pipe closes when the keeper dies for any reason.
3. When the process has ended for good, the actor gives back its resources: it removes itself and, on host 0 of a
   learner, the placement group, after the other hosts have ended, too.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

import ray
from ray.util import get_current_placement_group, remove_placement_group

from lightning_diloco.cli.local.interruption import GRACE_S
from lightning_diloco.cli.ray.files import Desk, host_names, host_of

_PAUSE_S, _OTHERS_S = 1.0, GRACE_S + 5.0


class Host:
    """Starts the keeper of a process, and restarts it after each death, until the process has ended for good.

    Args:
        run_dir: RUN_DIR.
        name: name of the process; see `host_names`.
        known_as: name of this actor.
    """

    def __init__(self, run_dir: str, name: str, known_as: str) -> None:
        self._run_dir, self._name, self._known_as = run_dir, name, known_as
        self._desk = Desk(Path(run_dir), name)
        self._address = ray.util.get_node_ip_address()
        threading.Thread(target=self._keep, name="diloco-keeper", daemon=True).start()

    def _keep(self) -> None:
        while not self._is_replaced:
            mark = secrets.token_hex(4)
            self._run_keeper(mark)
            if self._desk.ended(mark) is not None:
                break
            if self._desk.newest() != mark and not self._is_replaced:  # this actor was started again elsewhere
                return
            time.sleep(_PAUSE_S)
        if (group := get_current_placement_group()) is not None and host_of(self._name)[1] == 0:
            self._wait_for_others()
            remove_placement_group(group)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    @property
    def _is_replaced(self) -> bool:
        """Whether the process has a newer order, and so another actor and placement group."""
        order = self._desk.order()
        return order is not None and self._known_as not in host_names(order.known_as, order.num_hosts)

    def _wait_for_others(self) -> None:
        order, deadline_s = self._desk.order(), time.monotonic() + _OTHERS_S
        names = host_names(self._name, 1 if order is None else order.num_hosts)[1:]
        others = [Desk(Path(self._run_dir), name) for name in names]
        while not all(desk.ended(desk.newest()) for desk in others) and time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)

    def _run_keeper(self, mark: str) -> None:
        """Start a keeper, and wait for its end."""
        reader, writer = os.pipe()
        with self._desk.log_path.open("ab") as log:
            subprocess.run(
                (
                    sys.executable,
                    "-m",
                    "lightning_diloco.cli.ray.keeper",
                    self._run_dir,
                    self._name,
                    mark,
                    self._address,
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                check=False,  # closes the pipe, too
            )
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
