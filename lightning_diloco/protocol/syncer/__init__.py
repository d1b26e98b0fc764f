"""The syncer's state machine."""
