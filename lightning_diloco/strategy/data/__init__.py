"""Which training data a learner reads, and how many tokens are in it."""
