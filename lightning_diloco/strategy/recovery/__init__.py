"""How a learner that is started again goes on where it was."""
