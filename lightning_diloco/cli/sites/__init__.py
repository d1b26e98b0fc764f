"""Verbs for a site that takes part in a run: files that start syncer and learners, and checks of machine and link."""
