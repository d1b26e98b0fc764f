"""Functions for notebooks and scripts: forecast a run, read its history, export its anchor.

`lightning_diloco.load_anchor` loads the anchor into a module. The commands `diloco plan`, `diloco plot` and `diloco
export` do the same with files.

Source: our choice.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lightning_diloco.config import RunConfig
from lightning_diloco.planner.bandwidth import Machines
from lightning_diloco.planner.memory import Training
from lightning_diloco.planner.plan import Forecast, Scenario, forecast
from lightning_diloco.plots.story import Lane, Story, read
from lightning_diloco.strategy.options import RUN_NAMES, resolve
from lightning_diloco.strategy.trainer.parameters import embedding_names, named_parameters, trainable_parameters

if TYPE_CHECKING:
    from torch import nn

    from lightning_diloco.hf.export import Exported

_PROGRESS = pa.schema(
    {"t_s": "float64", "fleet_tokens": "int64", "goodput": "float64", "bytes_up": "int64", "bytes_down": "int64"}
)
_COMMITS = pa.schema(
    {
        "t_s": pa.float64(),
        "fragment": pa.int32(),
        "version": pa.int64(),
        "learners": pa.list_(pa.string()),
        "staleness": pa.list_(pa.int64()),
        "num_stepping": pa.int32(),
        "round_s": pa.float64(),
    }
)
_PHASES = pa.schema({"learner": "string", "start_s": "float64", "end_s": "float64", "phase": "string"})
_EVENTS = pa.schema({"learner": "string", "t_s": "float64", "event": "string"})
_STEPS = pa.schema({"learner": "string", "t_s": "float64", "step": "int64"})
_LOSSES = pa.schema({"learner": "string", "t_s": "float64", "kind": "string", "loss": "float64"})


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The history of a run. Times `t_s` are in seconds since its first event; `table.to_pandas()` needs pandas.

    Args:
        progress: t_s, fleet_tokens (seen by all learners), goodput (share of the planned tokens that is merged; null
            until it is known), bytes_up and bytes_down (of payloads, as the syncer counts them).
        commits: t_s, fragment, version, learners (list of contributors), staleness (list, in versions, one per
            contributor), num_stepping (learners that trained), round_s.
        phases: learner, start_s, end_s, phase ("stepping", "evaluating", "joining", "draining", "stalled" or
            "offline").
        events: learner, t_s, event ("join", "lapse", "return" or "leave").
        steps: learner, t_s, step (inner steps; a restarted process counts from its own start).
        losses: learner, t_s, kind ("train" or "val"), loss.
        summary: content of summary.json; empty while the run is not finished.
    """

    progress: pa.Table
    commits: pa.Table
    phases: pa.Table
    events: pa.Table
    steps: pa.Table
    losses: pa.Table
    summary: dict[str, Any]

    def __repr__(self) -> str:
        tables = [field.name for field in fields(self) if field.name != "summary"]
        num_rows = ", ".join(f"{name}: {getattr(self, name).num_rows:,} rows" for name in tables)
        return f"RunHistory({num_rows}, summary: {self.summary.get('status', 'none yet')})"


def run_history(run_dir: str | os.PathLike[str]) -> RunHistory:
    """Read the history of a run, finished or still running, as tables.

    Args:
        run_dir: RUN_DIR, or `default_root_dir/diloco/<time>` for a script that started its own syncer.

    Raises:
        ConfigError: this is no run directory, or no learner has joined yet.
        CorruptLogError: the tape is damaged.
    """
    story = read(Path(run_dir))
    lanes = story.lanes.values()
    return RunHistory(
        progress=_progress(story),
        commits=pa.Table.from_pylist([{n: getattr(c, n) for n in _COMMITS.names} for c in story.commits], _COMMITS),
        phases=_rows(_PHASES, [(one.name, s.start_s, s.end_s, s.phase) for one in lanes for s in one.spans]),
        events=_rows(_EVENTS, [(one.name, *mark) for one in lanes for mark in one.marks]),
        steps=_rows(_STEPS, [(one.name, *point) for one in lanes for point in one.steps]),
        losses=_rows(_LOSSES, [row for one in lanes for row in _losses(one)]),
        summary=dict(story.summary),
    )


def plan_run(
    module: nn.Module,
    machines: Machines,
    *,
    max_steps: int | None = None,
    on_cpu: bool = False,
    **options: Any,
) -> Forecast:
    """Forecast memory, links, time, disk and goodput of a run that trains a module.

    Args:
        module: the LightningModule, made as for training; its parameters may be on the meta device.
        machines: machines of the fleet: number of learners, their links, and the time of a step.
        max_steps: inner steps of each learner; None: not fixed.
        on_cpu: whether learners train on CPUs.
        options: options of the run, such as sync_every; see `DecoupledDiLoCoStrategy`.

    Returns:
        The forecast; `is_feasible` says whether the run fits, `tightest` is the scarcest resource.

    Raises:
        ConfigError: the module has no trainable parameters, or options are unknown or contradict each other.
    """
    params = trainable_parameters(module)
    everything = named_parameters(module)
    training = Training(
        num_parameters=sum(p.numel() for p in everything.values()),
        num_trainable=sum(p.numel() for p in params.values()),
        param_bytes=max(p.element_size() for p in params.values()),
    )
    scenario = Scenario(
        shapes={name: tuple(p.shape) for name, p in params.items()},
        mean_names=embedding_names(module, params),
        config=RunConfig.with_defaults(resolve(options, RUN_NAMES)[0]),
        training=training,
        fleet=machines,
        on_cpu=on_cpu,
        max_steps=max_steps,
    )
    return forecast(scenario)


def export_run(
    run_dir: str | os.PathLike[str], folder: str | os.PathLike[str], *, config: str | os.PathLike[str] | None = None
) -> Exported:
    """Write the anchor of a stopped run as a transformers folder and a Lightning checkpoint, or as safetensors.

    Args:
        run_dir: RUN_DIR of a finished or stopped run.
        folder: target folder, created if necessary; must be empty.
        config: LightningCLI config of the model; None: the newest one that a learner saved in RUN_DIR. Without any,
            only the parameters are written, by name.

    Raises:
        ConfigError: the folder is not empty, or run_dir is not a run directory.
        PlanMismatchError: the config describes another model than the run's.
        StorageError: the run is not stopped, or its files cannot be read.
    """
    from lightning_diloco.hf.export import export  # transformers, needed only here

    return export(Path(run_dir), Path(folder), config=None if config is None else Path(config))


def _progress(story: Story) -> pa.Table:
    goodput = dict(story.goodput)
    totals = zip(story.fleet_tokens, story.bytes_up, story.bytes_down, strict=True)  # of the same progress notes
    return _rows(_PROGRESS, [(t_s, tokens, goodput.get(t_s), up, down) for (t_s, tokens), (_, up), (_, down) in totals])


def _losses(lane: Lane) -> list[tuple[str, float, str, float]]:
    by_kind = {"train": lane.train_loss, "val": lane.val_loss}
    return [(lane.name, t_s, kind, loss) for kind, points in by_kind.items() for t_s, loss in points]


def _rows(schema: pa.Schema, rows: list[tuple[Any, ...]]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
