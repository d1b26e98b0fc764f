"""Fields in Lightning's progress bar: anchor version, staleness, fragments in flight, number of learners.

1. The bar's own `get_metrics`, or a user's override, is called first. At the end of the fit the bar is restored.
2. If the syncer cannot be reached, a warning takes the place of the fields. On a terminal it is coloured: the words in
   tqdm's bar, the line of metrics in rich's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_diloco.learner.status import LearnerStatus

NUM_NAMED = 3

_YELLOW, _PLAIN = "\x1b[33m", "\x1b[0m"
_RICH_STYLE = "bold yellow"


class ProgressFields:
    """Adds our fields to a bar, from now until `remove`.

    Args:
        bar: progress bar of the Trainer.
        standing: returns the state of this learner, for each redraw; None if it is in no run.
    """

    def __init__(self, bar: ProgressBar, standing: Callable[[], LearnerStatus | None]) -> None:
        self._bar = bar
        self._standing = standing
        self._others = bar.get_metrics
        self._style: Any = None
        bar.get_metrics = self._get_metrics  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the bar; idempotent."""
        self._bar.__dict__.pop("get_metrics", None)
        self._colour_rich(False)

    def _get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        if (standing := self._standing()) is None:
            return self._others(trainer, pl_module)
        is_offline = standing.offline_s is not None
        self._colour_rich(is_offline)
        found = fields(standing)
        if is_offline and _is_terminal(self._bar):
            found = {name: f"{_YELLOW}{text}{_PLAIN}" for name, text in found.items()}
        return {**self._others(trainer, pl_module), **found}

    def _colour_rich(self, is_offline: bool) -> None:
        column = getattr(self._bar, "_metric_component", None) if isinstance(self._bar, RichProgressBar) else None
        if column is None or is_offline == (self._style is not None):
            return
        if is_offline:
            self._style, column._style = column._style, _RICH_STYLE
        else:
            column._style, self._style = self._style, None


def fields(standing: LearnerStatus) -> dict[str, str]:
    """Return the fields by name, as text."""
    if standing.offline_s is not None:
        return {"syncer": f"offline {duration(standing.offline_s)}, training on"}
    old, new = standing.versions
    return {
        "anchor": f"v{new}" if old == new else f"v{old}-{new}",
        "stale": str(standing.staleness_versions),
        "in flight": _some(standing.in_flight),
        "learners": "?" if standing.num_learners is None else str(standing.num_learners),
    }


def _some(fragments: tuple[int, ...]) -> str:
    """Return the names of the first fragments; a bar has only one line."""
    names = ",".join(f"f{p}" for p in fragments[:NUM_NAMED]) or "-"
    return names if len(fragments) <= NUM_NAMED else f"{names}+{len(fragments) - NUM_NAMED}"


def duration(seconds: float) -> str:
    """Return a duration as 45s, 2m10s or 3h05m."""
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def _is_terminal(bar: ProgressBar) -> bool:
    return isinstance(bar, TQDMProgressBar) and bar.train_progress_bar.fp.isatty()
