"""One learner of a mixed fleet, as a script: python -m tests.xla.learner ACCELERATOR BATCH_SIZE TAPE RESULT_FILE."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from tests.xla.test_xla_trainer import Line, loader, trainer_for

NUM_JOINT_COMMITS = 60
LOOK_EVERY = 20


def joint_commits(tape: Path) -> list[dict[str, Any]]:
    """Return the commits with contributions of two learners."""
    lines = tape.read_text().splitlines(keepends=True) if tape.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if event["event"] == "commit" and len(event["learners"]) == 2]


class Together(Callback):
    """Ends training when the learners have enough joint commits."""

    def __init__(self, tape: Path) -> None:
        self.tape = tape

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % LOOK_EVERY == 0:
            trainer.should_stop = len(joint_commits(self.tape)) >= NUM_JOINT_COMMITS


if __name__ == "__main__":
    accelerator, batch_size, tape, result = sys.argv[1:]
    torch.manual_seed(5)
    model = Line()
    trainer = trainer_for(
        Path(tempfile.mkdtemp(dir=Path(result).parent)),
        -1,
        max_epochs=-1,
        max_time={"minutes": 4},
        accelerator=accelerator,
        val_check_interval=LOOK_EVERY,
        strategy={"quorum": 2},  # steps this short would rarely share a round otherwise
        callbacks=[Together(Path(tape))],
    )
    trainer.fit(model, loader(int(batch_size)), loader())
    Path(result).write_text(json.dumps({"val_losses": model.val_losses, "steps": trainer.global_step}))
