"""The learner's state machine."""
