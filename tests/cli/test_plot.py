"""`diloco plot`: plots of finished and of unfinished runs."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_diloco.cli.main import main
from tests.plots.conftest import LINES, make_run

__all__ = ["make_run"]

pytest.importorskip("matplotlib")

NAMES = {"timeline", "loss", "goodput", "versions", "bandwidth", "overview"}
Make = Callable[..., Path]


@pytest.mark.seconds
def test_every_plot_is_written_as_png_and_svg_with_its_labels(
    make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, to = make_run(), tmp_path / "to"
    assert main(["plot", str(run_dir), "--to", str(to), "--cap", "2kbit"]) == 0
    assert {path.name for path in to.iterdir()} == {f"{name}.{kind}" for name in NAMES for kind in ("png", "svg")}
    assert capsys.readouterr().out.split() == [str(path) for path in sorted(to.iterdir(), key=_as_printed)]
    for path in to.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    for path in to.glob("*.svg"):
        ET.parse(path)
    said = (to / "overview.svg").read_text()
    for text in ("l0", "l1", "joins again", "lapses", "goodput so far", "cap 2kbit/s"):
        assert f"<!-- {text} -->" in said


def _as_printed(path: Path) -> tuple[int, str]:
    order = ("timeline", "loss", "goodput", "versions", "bandwidth", "overview")
    return order.index(path.stem), path.suffix


@pytest.mark.seconds
def test_a_run_that_has_just_begun_can_be_drawn(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(LINES[:3])
    assert main(["plot", str(run_dir)]) == 0
    assert (run_dir / "plots" / "overview.png").exists()


@pytest.mark.slow
def test_the_same_run_gives_the_same_svg(make_run: Make, tmp_path: Path) -> None:
    run_dir = make_run()
    for folder in ("a", "b"):
        main(["plot", str(run_dir), "--to", str(tmp_path / folder)])
    assert (tmp_path / "a" / "overview.svg").read_bytes() == (tmp_path / "b" / "overview.svg").read_bytes()


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path)]) == 2
    assert "give the RUN_DIR" in capsys.readouterr().err
