"""The protocol of learner and syncer as pure state machines: `handle(event, now_s) -> list[Action]`.

This package has no clocks, sockets, threads or tensors. Learner and syncer drive the machines with real ones, the
simulator and the property tests with simulated ones.
"""
