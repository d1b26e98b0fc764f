"""Status, summary and history of a run."""
