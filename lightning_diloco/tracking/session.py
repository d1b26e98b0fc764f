"""One W&B run of a process.

1. The group is the run's id, the W&B id is made of it and of who logs: started again, a process goes on in the same W&B
   run.
2. Every curve is over `fleet_tokens`, the tokens seen by all learners: what learners of different speed can be compared
   by. Each row has the latest value.
3. Without a login nothing is asked and nothing fails: the run is recorded offline, and said how to upload it. A mode
   that was chosen (WANDB_MODE, `wandb offline`) is left alone.
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
    """A W&B run that is open.

    Args:
        project: of W&B.
        run: id of the run.
        who: "syncer", or the learner's id.
        folder: where `wandb/` is made.
        config: shown beside the run.
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
            settings=wandb.Settings(console="off"),  # what is printed is in the process's own log
        )
        self._run.define_metric(AXIS)
        self._run.define_metric("*", step_metric=AXIS)
        self._tokens = 0.0
        if why_offline:
            log.warning("%s; upload it later with: wandb sync --append %s", why_offline, Path(self._run.dir).parent)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Log one row; what is None is left out."""
        self._tokens = metrics.get(AXIS) or self._tokens
        told = {name: value for name, value in metrics.items() if value is not None}
        self._run.log({**told, AXIS: self._tokens})

    def configure(self, values: Mapping[str, Any]) -> None:
        """Show these beside the run."""
        self._run.config.update(dict(values), allow_val_change=True)

    def finish(self, *, summary: Mapping[str, Any] | None = None, failed: bool = False) -> None:
        """Close the run."""
        self._run.summary.update(dict(summary or {}))
        self._run.finish(exit_code=int(failed))


def offline_reason() -> str | None:
    """Why runs are recorded offline although nobody chose that; None: there is a login, or another mode was chosen."""
    if wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False):
        return None
    return "W&B: found no login (WANDB_API_KEY, or `wandb login`), so runs are recorded offline"
