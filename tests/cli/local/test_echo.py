"""Warnings of learners are shown once on the display of the run."""

from __future__ import annotations

import warnings
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_diloco.cli.local.echo import Echo

OURS = "/site-packages/lightning_diloco/strategy/data.py:177: "


def test_a_warning_of_this_package_is_shown_once_for_all_learners(tmp_path: Path) -> None:
    logs = {name: tmp_path / name for name in ("l0", "l1")}
    logs["l0"].write_text(f"{OURS}of an earlier run\n")
    said: list[str] = []
    echo = Echo(logs, said.append)
    echo.look()
    with logs["l0"].open("a") as log:
        log.write(f"Epoch 0: 10 %\r{OURS}UserWarning: part 0 of 2\n/x/lightning/fit.py:3: not ours\n{OURS}the sec")
    echo.look()
    logs["l1"].write_text(f"{OURS}part 1 of 2\n{OURS}another\n")
    with logs["l0"].open("a") as log:
        log.write("ond half\n")
    echo.look()
    echo.look()
    assert said == ["l0 warns: part 0 of 2", "l0 warns: the second half", "l1 warns: another"]


def test_warnings_of_this_package_have_the_expected_form(tmp_path: Path) -> None:
    """Lightning's warning names the file. If it named another one, the warning would not be shown."""
    log, said = tmp_path / "log.txt", []
    echo = Echo({"l0": log}, said.append)
    code = compile("warn('nothing is split')", "/x/lightning_diloco/strategy/data.py", "exec")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(code, {"warn": rank_zero_warn})
    (warning,) = caught
    log.write_text(warnings.formatwarning(warning.message, warning.category, warning.filename, warning.lineno))
    echo.look()
    assert said == ["l0 warns: nothing is split"]
