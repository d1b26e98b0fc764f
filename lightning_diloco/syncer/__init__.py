"""The syncer's process: the protocol machine behind a server, the arithmetic of a merge, and the disk."""
