"""Benchmarks, each a program that prints a table. Start them with `python tests/bench/run.py [names]`."""
