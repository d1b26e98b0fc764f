"""Plots of a run from its tape and the learners' CSV metrics; needs matplotlib (extra `plot`)."""
