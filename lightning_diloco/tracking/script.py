"""Where a script's own WandbLogger finds its place in a run: W&B's environment variables.

1. Project, group, id, name and resumption are those that `session.py` gives to learners of recipes, so that the
   syncer's run is in the same group, and a script that is started again goes on in its W&B run.
2. Nothing is forced: W&B prefers what the script itself says, and a script without a logger logs nothing.
3. Without a login it is recorded offline, unless a mode was chosen.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import cache

# It ends at once: without a network, W&B's service may miss that it should, and its client waits for ten minutes.
_ASK = """
import os
from lightning_diloco.tracking.session import offline_reason
print(offline_reason() or "", flush=True)
os._exit(0)
"""


def environment(project: str, run: str, learner: str) -> Mapping[str, str]:
    """Variables for the process of a learner.

    Args:
        project: of W&B.
        run: id of the run.
        learner: its id.
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
    """Asked in a process of its own: where it is asked, W&B starts a service and sets variables."""
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True)
    return bool(asked.stdout.strip())
