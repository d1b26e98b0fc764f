"""The W&B run of one process.

1. The W&B group is the run's id, and the W&B id consists of the run's id and the learner's id or "syncer". A restarted
   process therefore continues its W&B run.
2. The x-axis of every curve is `fleet_tokens`, the tokens seen by all learners, so that learners of different speed can
   be compared. Each row has the latest value.
3. Without a login there is no prompt and no error. The run is recorded offline, and a warning says how to upload it. A
   mode that the user has chosen (WANDB_MODE, `wandb offline`) is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

log = logging.getLogger(__name__)

AXIS = "fleet_tokens"


class Session:
    """An open W&B run.

    Args:
        project: W&B project.
        run: id of the run.
        who: "syncer", or the learner's id.
        folder: folder in which `wandb/` is created.
        config: config of the W&B run.
    """

    def __init__(self, project: str, *, run: str, who: str, folder: Path, config: Mapping[str, Any]) -> None:
        why_offline = offline_reason()
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            group=run,
            id=f"{run}-{who}",
            name=who,
            job_type="syncer" if who == "syncer" else "learner",
            dir=folder,
            resume="allow",
            mode="offline" if why_offline else None,
            config=dict(config),
            settings=wandb.Settings(console="off"),  # the process has its own log
        )
        self._run.define_metric(AXIS)
        self._run.define_metric("*", step_metric=AXIS)
        self._tokens = 0.0
        if why_offline:
            log.warning("%s; upload it later with: wandb sync --append %s", why_offline, Path(self._run.dir).parent)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Log one row, without values that are None."""
        self._tokens = metrics.get(AXIS) or self._tokens
        told = {name: value for name, value in metrics.items() if value is not None}
        self._run.log({**told, AXIS: self._tokens})

    def configure(self, values: Mapping[str, Any]) -> None:
        """Add values to the config of the W&B run."""
        self._run.config.update(dict(values), allow_val_change=True)

    def finish(self, *, summary: Mapping[str, Any] | None = None, failed: bool = False) -> None:
        """Close the run."""
        self._run.summary.update(dict(summary or {}))
        self._run.finish(exit_code=int(failed))


def offline_reason() -> str | None:
    """Return why runs are recorded offline; None if there is a login or the user has chosen a mode."""
    if wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False):
        return None
    return "W&B: found no login (WANDB_API_KEY, or `wandb login`), so runs are recorded offline"
