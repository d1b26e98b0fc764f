"""How messages and payloads travel between learners and their syncer."""
