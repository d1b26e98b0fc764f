"""The algorithm: tensors in, tensors out; no network, no clock, no Lightning."""
