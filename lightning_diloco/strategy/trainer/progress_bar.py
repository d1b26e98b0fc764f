"""Our fields in Lightning's progress bar: which anchor, how stale, what is in flight, who else is there.

1. The bar's own `get_metrics` is asked first and stays as it is, a user's override included. At the end of the fit the
   bar is what it was.
2. A syncer out of reach takes the place of the fields: training goes on, and people should know. At a terminal that is
   coloured: in tqdm's bar the words, in rich's the line of metrics.
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
        bar: of the Trainer.
        standing: asked at every redraw; None: this learner takes no part in a run.
    """

    def __init__(self, bar: ProgressBar, standing: Callable[[], LearnerStatus | None]) -> None:
        self._bar = bar
        self._standing = standing
        self._others = bar.get_metrics
        self._style: Any = None
        bar.get_metrics = self._get_metrics  # type: ignore[method-assign]

    def remove(self) -> None:
        """Leave the bar as it was; idempotent."""
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
    """The fields by name, as text."""
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
    """The first of them by name: a bar has one line."""
    names = ",".join(f"f{p}" for p in fragments[:NUM_NAMED]) or "-"
    return names if len(fragments) <= NUM_NAMED else f"{names}+{len(fragments) - NUM_NAMED}"


def duration(seconds: float) -> str:
    """45s, 2m10s or 3h05m."""
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def _is_terminal(bar: ProgressBar) -> bool:
    return isinstance(bar, TQDMProgressBar) and bar.train_progress_bar.fp.isatty()
