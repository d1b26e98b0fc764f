"""W&B environment variables that assign a script's own WandbLogger to a run.

1. Project, group, id, name and resumption are the same as those that `session.py` gives to learners of recipes. The
   syncer's run is therefore in the same group, and a restarted script continues its W&B run.
2. The script's own settings take precedence in W&B. A script without a logger logs nothing.
3. Without a login W&B records offline, unless the user has chosen a mode.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import cache

# os._exit, because without a network W&B's service may not stop, and its client would wait for it for ten minutes.
_ASK = """
import os
from lightning_diloco.tracking.session import offline_reason
print(offline_reason() or "", flush=True)
os._exit(0)
"""


def environment(project: str, run: str, learner: str) -> Mapping[str, str]:
    """Return the environment variables of a learner's process.

    Args:
        project: W&B project.
        run: id of the run.
        learner: id of the learner.
    """
    return {
        "WANDB_PROJECT": project,
        "WANDB_RUN_GROUP": run,
        "WANDB_RUN_ID": f"{run}-{learner}",
        "WANDB_NAME": learner,
        "WANDB_JOB_TYPE": "learner",
        "WANDB_RESUME": "allow",
        **({"WANDB_MODE": "offline"} if _is_logged_out() else {}),
    }


@cache
def _is_logged_out() -> bool:
    """Check in a separate process, because the check starts W&B's service and sets environment variables."""
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True)
    return bool(asked.stdout.strip())
