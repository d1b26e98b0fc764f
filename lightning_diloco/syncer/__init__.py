"""The syncer process: state machine, server, merge arithmetic and storage."""
