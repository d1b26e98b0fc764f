"""A learner of several processes: rank 0 follows the protocol, all ranks carry the tensors."""
