"""What gRPC writes to standard error, kept to errors: else every handshake of a stranger is a line in the syncer's log.

gRPC knows its environment variable alone for this, and reads it once, when its first server or client is made.
"""

from __future__ import annotations

import os


def keep_to_errors() -> None:
    """To be called before the first server or client is made; what the user has set stays."""
    if "GRPC_VERBOSITY" not in os.environ:
        os.environ["GRPC_VERBOSITY"] = "ERROR"
