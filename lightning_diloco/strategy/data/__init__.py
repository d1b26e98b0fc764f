"""Decides which training data a learner reads, and counts its tokens."""
