"""A learner's process: its link to the syncer, and all that runs beside training."""
