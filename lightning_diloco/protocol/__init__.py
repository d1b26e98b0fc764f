"""Who may do what, and when: pure state machines, `handle(event, now_s) -> list[Action]`.

No clock, socket, thread or tensor is in here. The runtime drives these machines with real ones; the simulator and the
property tests drive the very same machines with made-up ones.
"""

from lightning_diloco.protocol.grace import grace_window_s
from lightning_diloco.protocol.learner import LearnerState
from lightning_diloco.protocol.syncer import SyncerState

__all__ = ["LearnerState", "SyncerState", "grace_window_s"]
