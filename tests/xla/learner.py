"""One learner of a mixed fleet, as a script: python learner.py ACCELERATOR BATCH_SIZE SECONDS RESULT_FILE."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.xla.test_xla_trainer import Line, loader, trainer_for

if __name__ == "__main__":
    accelerator, batch_size, seconds, result = sys.argv[1:]
    torch.manual_seed(5)
    model = Line()
    folder = Path(tempfile.mkdtemp(dir=Path(result).parent))
    time = {"max_time": {"seconds": int(seconds)}, "max_epochs": -1}
    options = {"val_check_interval": 200, "strategy": {"quorum": 2}}  # tiny steps would rarely meet otherwise
    trainer = trainer_for(folder, -1, accelerator=accelerator, **time, **options)
    trainer.fit(model, loader(int(batch_size)), loader())
    Path(result).write_text(json.dumps({"val_losses": model.val_losses, "steps": trainer.global_step}))
