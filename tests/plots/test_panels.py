"""Panels are readable: texts do not overlap, curves are not flattened, and counts have whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.plots.story import Lane, read
from tests.plots.conftest import LINES, commit

END_S = 1000.0


@pytest.mark.parametrize(
    ("marks", "texts"),
    [
        ([(100.0, "lapse"), (500.0, "join"), (900.0, "leave")], ["lapses", "joins again", "leaves"]),
        (
            [(122.8, "lapse"), (123.0, "join"), (431.0, "lapse"), (432.0, "return")],
            ["lapses, joins again", "lapses, returns"],
        ),
        ([(500.0, "join"), (960.0, "join"), (992.0, "leave")], ["joins again", "joins again, leaves"]),
    ],
    ids=["apart", "together", "at the end"],
)
def test_texts_of_marks_do_not_overlap(marks: list[tuple[float, str]], texts: list[str]) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from lightning_diloco.plots.panels import _mark_texts

    figure = Figure(figsize=(8, 3), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set(xlim=(0, END_S * 1.01), ylim=(1.6, -0.75))
    lane = Lane("l0")
    lane.marks = [(0.0, "join"), *marks]
    _mark_texts(axes, lane, 0, "black")
    canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == texts
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)


@pytest.fixture
def axes() -> Any:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(8, 3), layout="constrained").subplots()


@pytest.mark.parametrize(("factor", "is_drawn"), [(2.0, True), (1000.0, False)])
def test_a_cap_leaves_room_for_the_traffic_below_it(
    make_run: Callable[..., Path], axes: Any, factor: float, is_drawn: bool
) -> None:
    from lightning_diloco.plots import panels

    story = read(make_run())
    most_bps = max(rate for _, rate in panels._rates(story.bytes_down))
    panels.bandwidth(axes, story, cap_bps=factor * most_bps)
    assert axes.get_ylim()[1] < 4 * most_bps
    assert any(line.get_linestyle() == "--" for line in axes.lines) is is_drawn
    (said,) = (text.get_text() for text in axes.texts if "cap" in text.get_text())
    assert said.endswith("at most 0.1 % of it is used") is not is_drawn


def test_versions_are_counted_in_whole_numbers(make_run: Callable[..., Path], axes: Any) -> None:
    from lightning_diloco.plots import panels

    panels.versions(axes, read(make_run([*LINES, *(commit(10 + k / 8, 0, 2 + k, "l1") for k in range(17))])))
    assert axes.get_ylim()[1] > 17
    assert all(tick == int(tick) for tick in axes.get_yticks())
