"""The algorithm as functions of tensors, without network, clock or Lightning."""
