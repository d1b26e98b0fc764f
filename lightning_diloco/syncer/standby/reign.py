"""The reign of a run: how often a standby has taken over. The syncer with the higher reign serves the run.

RUN_DIR/syncer/reign holds the reign of the syncer whose history the directory has. A standby that takes over begins the
next one. So a former primary that comes back knows who is newer, also after takeovers back and forth.
"""

from __future__ import annotations

from pathlib import Path

from lightning_diloco.storage.files import write_whole

_FILE = "syncer/reign"


def reign(run_dir: Path) -> int:
    """Return the reign of a run directory; 0 before the first takeover."""
    file = run_dir / _FILE
    return int(file.read_text()) if file.exists() else 0


def set_reign(run_dir: Path, number: int) -> None:
    """Write the reign durably."""
    write_whole(run_dir / _FILE, str(number).encode())
