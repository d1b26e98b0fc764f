"""Options of a Trainer that writes and draws nothing."""

from __future__ import annotations

from typing import Any

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
