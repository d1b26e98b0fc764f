"""Files of a run: the syncer's log, snapshots and events, and the learners' checkpoints."""
