"""The learner's machine."""
