"""The protocol of learner and syncer as pure state machines: `handle(event, now_s) -> list[Action]`.

This package has no clocks, sockets, threads or tensors. The learner and the syncer connect the machines to real ones.
The simulator and the property tests connect them to simulated ones.
"""
