"""The learner process: its link to the syncer, and all that runs in parallel with training."""
