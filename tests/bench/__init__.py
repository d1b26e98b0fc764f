"""Benchmarks: programs that print one table each. Start them with `python tests/bench/run.py [names]`."""
