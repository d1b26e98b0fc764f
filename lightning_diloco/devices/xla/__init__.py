"""Fragments on XLA devices."""
