"""Lets a restarted learner continue from its last checkpoint."""
