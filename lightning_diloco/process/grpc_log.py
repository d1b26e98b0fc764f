"""Limits gRPC's log to errors; otherwise each failed handshake adds a line to the syncer's log.

gRPC can only be configured by an environment variable, which it reads when its first server or client is made.
"""

from __future__ import annotations

import os


def keep_to_errors() -> None:
    """Set the log level, unless the user has set it. Call this before the first server or client is made."""
    if "GRPC_VERBOSITY" not in os.environ:
        os.environ["GRPC_VERBOSITY"] = "ERROR"
