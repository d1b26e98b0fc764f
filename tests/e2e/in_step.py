"""Learners of one run contribute after the same step, in any order of arrival.

1. A round is announced to all learners when the first one asks for it. A learner that is a step behind would contribute
   a step earlier. So an announcement is handled when this learner is due, too; a slow network has the same effect.
2. Rounds wait only for learners that have made a step. After its first step, a learner waits for a file that appears
   when all learners have made one.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lightning_diloco.protocol import events, messages

GO_S = 180.0


class InStep(Callback):
    """For paced learners, see trainer.py.

    Args:
        go: the file.
    """

    def __init__(self, go: Path) -> None:
        self._go = go
        self._early: dict[int, events.FromTheSyncer] = {}

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            self._link: Any = trainer.strategy._present.link
            self._pass_on, self._link._handle = self._link._handle, self._handle

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        until_s = time.monotonic() + GO_S
        while trainer.is_global_zero and not self._go.exists():
            assert time.monotonic() < until_s, f"still waiting for {self._go}"
            time.sleep(0.01)

    def _handle(self, event: Any) -> int:
        with self._link._changed:
            if isinstance(event, events.FromTheSyncer) and isinstance(event.message, messages.Announce):
                self._early[event.message.fragment] = event
                num_exchanges = 0
            else:
                num_exchanges = self._pass_on(event)
            now = [p for p in self._early if self._is_due(p)]
            return num_exchanges + sum(self._pass_on(self._early.pop(p)) for p in now)

    def _is_due(self, p: int) -> bool:
        machine = self._link._machine
        return bool(machine.fragments[p].is_due or machine.phase == "draining")
