"""Who may do what, and when: pure state machines, `handle(event, now_s) -> list[Action]`.

No clock, socket, thread or tensor is in here. Learner and syncer drive these machines with real ones; the simulator and
the property tests drive the very same machines with made-up ones.
"""
