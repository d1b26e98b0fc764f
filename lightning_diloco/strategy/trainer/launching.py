"""The launcher of a learner, and the checks before it starts a process.

1. The final class initializes Lightning's strategy (`_bind`), and checks whether `inner=` fits the Trainer's devices.
2. The launcher separates this learner's paths from other learners' before any process is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from typing_extensions import override

from lightning_diloco.config import LearnerConfig
from lightning_diloco.strategy.data.hooks import wants_link
from lightning_diloco.strategy.fit_holder import HoldsFit
from lightning_diloco.strategy.identity import check_first_fit, learner_id
from lightning_diloco.strategy.trainer.paths import OwnPathsFirst, run_root, separate_paths

if TYPE_CHECKING:
    import lightning.pytorch as pl


class LaunchesInOwnPaths(HoldsFit):
    """Mixin of `DiLoCoHooks`."""

    _learner: LearnerConfig
    _has_inner = False  # whether the user chose the final class, by `inner=`

    def _bind(self) -> None:
        """Initialize Lightning's strategy with the attributes that the Trainer has set so far."""
        raise NotImplementedError

    def _check_devices(self, devices: Sequence[torch.device], num_nodes: int) -> None:
        """Compare `inner=` with the Trainer's devices.

        Raises:
            ConfigError: they do not fit.
        """

    @override
    def _configure_launcher(self) -> None:
        if self._has_inner:
            self._check_devices(self.parallel_devices or [], self.num_nodes)  # type: ignore[attr-defined]
        super()._configure_launcher()
        self._launcher = self._own_launcher()

    def _own_launcher(self) -> _Launcher:
        """Return the launcher that replaces Lightning's and starts the same processes."""
        return OwnPathsFirst(self._separate_paths, self._sigterm_came)

    def _sigterm_came(self) -> None:
        """Note SIGTERM; the signal's handler calls this."""
        if self._fit is not None:
            self._fit.preemption.notice()

    def _separate_paths(self, trainer: pl.Trainer) -> None:
        """Give the learner its own paths, before Lightning looks for anything there."""
        if not wants_link(trainer):
            return
        check_first_fit(self._learner)
        self._root_dir, self._run_root = trainer.default_root_dir, run_root(trainer)
        if (name := learner_id(self._learner)) is not None:
            self._learner = replace(self._learner, learner=name)
            separate_paths(trainer, name)
