"""A standby of the syncer on another machine: it follows the primary's log, and takes over if the primary fails."""
