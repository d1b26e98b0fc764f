"""The syncer's machine."""
