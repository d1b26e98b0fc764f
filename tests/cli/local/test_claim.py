"""Only one `diloco run` at a time can use a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_diloco.cli.local.claim import claimed
from lightning_diloco.errors import ConfigError
from lightning_diloco.storage.redo_log import RedoLog


def test_a_second_run_is_refused_and_the_first_one_keeps_its_claim(tmp_path: Path) -> None:
    with claimed(tmp_path):
        for _ in range(2):
            with pytest.raises(ConfigError, match="in use by another `diloco run`"), claimed(tmp_path):
                pass
    with claimed(tmp_path):
        pass


def test_a_directory_that_a_syncer_serves_is_refused(tmp_path: Path) -> None:
    log = RedoLog(tmp_path / "syncer" / "log")
    with pytest.raises(ConfigError, match="in use by another syncer"), claimed(tmp_path):
        pass
    log.close()
    with claimed(tmp_path):  # leaves it to the syncer that is started now
        RedoLog(tmp_path / "syncer" / "log").close()
