"""The reign of a run: how often a standby has taken over. The syncer with the higher reign serves the run.

RUN_DIR/syncer/reign holds the reign of the syncer whose history the directory has. A standby that takes over begins the
next one. So a former primary that returns knows which syncer is newer, also after takeovers back and forth.
RUN_DIR/syncer/reign_after holds the last record before this reign. A former primary may keep its records up to it.
"""

from __future__ import annotations

from pathlib import Path

from lightning_diloco.storage.files import write_whole

_FILE = "syncer/reign"
_AFTER = "syncer/reign_after"


def reign(run_dir: Path) -> int:
    """Return the reign of a run directory; 0 before the first takeover."""
    file = run_dir / _FILE
    return int(file.read_text()) if file.exists() else 0


def set_reign(run_dir: Path, number: int) -> None:
    """Write the reign durably."""
    write_whole(run_dir / _FILE, str(number).encode())


def begin_reign(run_dir: Path, last_lsn: int) -> int:
    """Note the last record before this syncer's reign, unless it is noted already, and return it.

    Args:
        run_dir: RUN_DIR of a syncer that has taken over.
        last_lsn: last record of its log, before the syncer decides anything.
    """
    file = run_dir / _AFTER
    if not file.exists():
        write_whole(file, str(last_lsn).encode())
    return int(file.read_text())


def has_begun(run_dir: Path) -> bool:
    """Return whether this syncer's reign has begun; False for one that is about to take over."""
    return (run_dir / _AFTER).exists()


def forget_reign_after(run_dir: Path) -> None:
    """Forget when this reign began: this directory becomes a standby's."""
    (run_dir / _AFTER).unlink(missing_ok=True)
