"""Fields in Lightning's progress bars, which are restored after the fit."""

from __future__ import annotations

import contextlib
import io

import pytest
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar

from lightning_diloco.learner.status import LearnerStatus
from lightning_diloco.strategy.trainer.progress_bar import ProgressFields, duration, fields

ONLINE = LearnerStatus((3, 4), 1, (2, 5), 7, None)
OFFLINE = LearnerStatus((3, 4), 1, (2, 5), 7, 130.4)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Bar(ProgressBar):
    """A user's progress bar with its own field."""

    shown: list

    def get_metrics(self, trainer, pl_module):
        return {**super().get_metrics(trainer, pl_module), "mine": 1}

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.shown.append(self.get_metrics(trainer, pl_module))


def test_fields_show_the_status_of_a_learner():
    assert fields(ONLINE) == {"anchor": "v3-4", "stale": "1", "in flight": "f2,f5", "learners": "7"}
    fresh = LearnerStatus((0, 0), 0, (), None, None)
    assert fields(fresh) == {"anchor": "v0", "stale": "0", "in flight": "-", "learners": "?"}
    assert fields(LearnerStatus((0, 1), 1, tuple(range(24)), 1, None))["in flight"] == "f0,f1,f2+21", (
        "a bar has one line"
    )


def test_a_warning_about_an_unreachable_syncer_replaces_the_fields():
    assert fields(OFFLINE) == {"syncer": "offline 2m10s, training on"}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.9, "0s"), (59, "59s"), (60, "1m00s"), (3599, "59m59s"), (11_100, "3h05m")]
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_a_users_bar_keeps_its_own_fields_and_is_restored(scenario, model, trainer_for):
    bar = Bar()
    bar.shown = []
    trainer_for(callbacks=bar, enable_progress_bar=True, max_steps=2).fit(model)
    assert bar.shown == [{"mine": 1, "anchor": "v3-4", "stale": "1", "in flight": "f2", "learners": "2"}] * 2
    assert "get_metrics" not in vars(bar)


def test_the_bar_is_restored_after_a_failed_fit(scenario, model, trainer_for):
    scenario.step_error = RuntimeError("no")
    bar = Bar()
    with pytest.raises(RuntimeError, match="no"):
        trainer_for(callbacks=bar, enable_progress_bar=True).fit(model)
    assert "get_metrics" not in vars(bar)


@pytest.mark.parametrize(("said", "colour"), [(Terminal(), "\x1b[33m"), (io.StringIO(), "")])
def test_tqdm_colours_the_words_only_on_a_terminal(scenario, model, trainer_for, said, colour):
    scenario.standing = OFFLINE
    with contextlib.redirect_stdout(said):
        trainer_for(callbacks=TQDMProgressBar(), enable_progress_bar=True, num_sanity_val_steps=0).fit(model)
    assert f"syncer={colour}offline 2m10s, training on" in said.getvalue()
    assert ("\x1b[33m" in said.getvalue()) == bool(colour)


def test_rich_colours_its_line_while_offline(scenario, model, trainer_for):
    bar = RichProgressBar(console_kwargs={"file": io.StringIO(), "force_terminal": True})
    standing, styles = [ONLINE], []
    adder = ProgressFields(bar, lambda: standing[0])
    bar._metric_component = column = type("Column", (), {"_style": "italic"})()
    trainer = trainer_for(callbacks=bar, enable_progress_bar=True)
    for standing[0] in (ONLINE, OFFLINE, OFFLINE, ONLINE, OFFLINE):
        bar.get_metrics(trainer, model)
        styles.append(column._style)
    adder.remove()
    assert styles == ["italic", "bold yellow", "bold yellow", "italic", "bold yellow"]
    assert column._style == "italic"


def test_rich_shows_the_fields_of_a_fit(scenario, model, trainer_for):
    console = {"file": io.StringIO(), "force_terminal": True, "width": 200}
    scenario.standing = OFFLINE
    trainer_for(callbacks=RichProgressBar(console_kwargs=console), enable_progress_bar=True).fit(model)
    assert "syncer: offline 2m10s, training on" in console["file"].getvalue()
