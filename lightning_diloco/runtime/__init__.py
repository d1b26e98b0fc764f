"""Drives protocol and core with a transport, a clock and a disk."""
