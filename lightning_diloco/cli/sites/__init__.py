"""What a site needs to take part: files that start syncer and learners, and checks of a machine and its link."""
