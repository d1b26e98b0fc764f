"""Texts of the timeline can be read: none lies on another, or outside the picture."""

from __future__ import annotations

from itertools import combinations

import pytest

from lightning_diloco.plots.story import Lane

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
