"""The page in a real browser: its content, its updates, and the display of a silent syncer.

These tests are skipped if Chromium is not installed (Debian: `apt-get install chromium`). All other tests of the page
need no browser.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from lightning_diloco.live.server import PageServer
from lightning_diloco.live.watch import Watch
from tests.live.told import START, learner, status

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
]


class Answering(Watch):
    """Changes the run before each answer to the page."""

    def __init__(self, *happenings: Callable[[Watch], None], places: Callable[[], Mapping[str, str]] = dict) -> None:
        super().__init__("folder", clock=lambda: START + 60.0, places=places)
        self._happenings = list(happenings)

    def state(self) -> dict[str, object]:
        if self._happenings:
            self._happenings.pop(0)(self)
        return super().state()


@pytest.fixture
def rendered(tmp_path: Path) -> Callable[..., str]:
    """Return the page after some time of the browser, which passes at once while the browser is idle."""

    def render(watch: Watch) -> str:
        with PageServer(watch, "127.0.0.1:0", identity_dir=tmp_path) as server:
            options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
            options += ["--window-size=1200,900", "--virtual-time-budget=5000", "--dump-dom"]
            done = subprocess.run(
                [str(BROWSER), *options, server.url], check=True, capture_output=True, text=True, timeout=120
            )
        return done.stdout.partition("</style>")[2].partition("<script>")[0]

    return render


def text_of(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_learners_are_grouped_by_site(rendered: Callable[..., str]) -> None:
    fleet = [learner(name, 7) | {"site": site} for name, site in (("l0", "west"), ("l1", "east"), ("l2", "west"))]
    text = text_of(rendered(Answering(lambda watch: watch.saw(status(10, *fleet)))))
    shown = ("east 5.12k tokens/s", "l1 stepping", "west 10.2k tokens/s", "l0 stepping", "l2 stepping")
    places = [text.index(words) for words in shown]
    assert places == sorted(places)


def test_the_page_shows_the_run_and_updates_by_itself(rendered: Callable[..., str]) -> None:
    odd = learner("<b>odd</b>", 7, loss=2.345)
    lapse = {"t": START + 50, "event": "lapse", "learner": "l1", "silent_s": 15.0}
    html = rendered(
        Answering(
            lambda watch: watch.saw(status(10)),
            lambda watch: watch.saw(status(20, odd, learner("l1", 6, phase="lapsed"), recent=[lapse])),
        )
    )
    text = text_of(html)
    for part in ("gpt-20261120-abc123", "training", "1 of 2 learners", "97.0 % participation", "93.0 % goodput"):
        assert part in text
    for part in ("l1 for 0.4 s, at most 1.2 s more", "fragment 1, round 9, collecting; then: the round closes"):
        assert part in text
    assert "l1 lapsed after 15.0 s of silence" in text
    assert "2.345" in text
    assert "&lt;b&gt;odd&lt;/b&gt;" in html  # names are shown as text


def test_the_page_shows_shards_the_standby_and_where_processes_are(rendered: Callable[..., str]) -> None:
    shards = [{"shard": 1, "away_s": None}, {"shard": 2, "away_s": 4.0}]

    def text_with(**standby: float) -> str:
        told = status(10, shards=shards, standby={"address": "b:4000", "waits_s": None, **standby})
        return text_of(rendered(Answering(lambda watch: watch.saw(told), places=lambda: {"l0": "on node-7"})))

    behind = text_with(silent_s=0.2, records_behind=12)
    for part in ("2 of 3 shards", "12 behind standby", "Processes where they run, or how they ended l0 on node-7"):
        assert part in behind
    assert "in step standby" in text_with(silent_s=0.2, records_behind=0)
    assert "silent 9.0 s, 3 behind standby" in text_with(silent_s=9.0, records_behind=3)


def test_curves_are_drawn(rendered: Callable[..., str]) -> None:
    watch = Watch("folder", clock=iter(range(int(START), int(START) + 500)).__next__)
    for step in range(1, 30):
        watch.saw(status(step, learner("l0", step, loss=5.0 - step / 10), learner("l1", step, loss=5.1, eval_loss=4.5)))
    html = rendered(watch)
    loss = html.partition('id="loss"')[2].partition("</svg>")[0]
    assert loss.count("<path") == 3  # curves of both learners and of the anchor
    assert html.partition('id="bandwidth"')[2].partition("</svg>")[0].count("<path") == 2


def test_a_silent_syncer_is_shown_as_such(rendered: Callable[..., str]) -> None:
    watch = Answering(lambda watch: watch.saw(status(10)), lambda watch: watch.saw(None, "connection refused"))
    html = rendered(watch)
    assert "no answer The syncer has not answered for 0.0 s; learners continue training" in text_of(html)
    assert "connection refused" in html
    assert 'class="stale"' in html


def test_the_end_is_shown_with_the_loss_of_the_final_anchor(rendered: Callable[..., str]) -> None:
    summary = {**status(100), "status": "finished", "wall_s": 125.0, "eval_loss": 3.21, "rounds": 12}
    html = rendered(Answering(lambda watch: watch.saw(status(10)), lambda watch: watch.ended(summary)))
    assert "finished The run is over after 2 min 5 s. The final anchor's loss is 3.2100." in text_of(html)


def test_the_page_of_an_interrupted_run_shows_how_to_continue_it(rendered: Callable[..., str]) -> None:
    summary = {**status(100), "status": "interrupted", "wall_s": 100.0, "fleet_tokens": 2.5e6, "eval_loss": None}
    figures = {"bytes_up": 8_690_000, "bytes_down": 900, "rounds": 12}
    html = rendered(Answering(lambda watch: watch.saw(status(10)), lambda watch: watch.ended({**summary, **figures})))
    text = text_of(html)
    assert "was interrupted after 1 min 40 s; the same command with the same --run-dir continues it." in text
    for part in ("8.69 MB received", "900 B sent", "25k tokens/s", "before the end"):
        assert part in text


def test_a_page_without_its_server_shows_a_message(rendered: Callable[..., str]) -> None:
    def gone(watch: Watch) -> None:
        raise ConnectionError

    text = text_of(rendered(Answering(lambda watch: watch.saw(status(10)), *[gone] * 20)))
    assert "page gone What served this page has ended" in text
