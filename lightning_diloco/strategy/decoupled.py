"""The public strategy class, and how it changes to its final class.

Lightning creates a strategy before it sets the accelerator, and later makes decisions by isinstance checks against its
own strategy classes. So the public class only holds options. `_configure_launcher` is the last method that the Trainer
calls while it sets a strategy up. There the object takes the final class for its devices: our hooks before one of
Lightning's strategies (`backends/`). All of Lightning's checks come later and see that class. It is registered as a
subclass of the public one, so that `isinstance` returns what users expect. A strategy that delegates to an inner one
does not work: Lightning's optimizers are bound to the inner strategy, so the outer one would see no steps.

To support more devices, add a final class and its line in `backends.FINAL_CLASSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import Strategy

from lightning_diloco.config import Align, AnchorDevice, Evaluate, Guard, Merge, Wire
from lightning_diloco.devices import is_accelerator
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy import backends
from lightning_diloco.strategy import inner as inners
from lightning_diloco.strategy.hooks import DiLoCoHooks
from lightning_diloco.strategy.options import resolve


class DecoupledDiLoCoStrategy(DiLoCoHooks):
    """Train one model together with learners far away: `Trainer(strategy=DecoupledDiLoCoStrategy(...))`.

    Every option has a default that works. An unset option (None) is adopted from the run that is joined, or takes its
    default if the run is new. An explicit run option must agree with the run. Nothing is opened before `fit`.

    A contribution holds the parameters as they are at the end of an inner step. On a CPU they are copied until the next
    update by an optimizer of the Trainer. If your code changes parameters elsewhere meanwhile, some of the changes are
    in this contribution and the rest is in the next one. Nothing is lost or counted twice.

    Learners exchange trainable parameters, and frozen ones that a finetuning callback may unfreeze or that an optimizer
    holds. All other frozen parameters must have the same values on all learners. The rest of the module's state stays
    local to each learner: statistics of BatchNorm, teachers that follow a student, queues, codebooks. So two learners
    may validate the same anchor differently. GroupNorm and LayerNorm have no such statistics, and
    `torch.optim.swa_utils.update_bn` computes those of the anchor. A restarted learner restores its own state from its
    checkpoint; a newcomer takes over that of a peer.

    With manual optimization, an inner step is a `training_step` in which an optimizer stepped. If no torch optimizer
    holds exchanged parameters, because your code updates them itself, every `training_step` is one. If none was counted
    in a fit, nothing was exchanged: the module keeps its own parameters, and a warning says so.

    The run is left after the last step, before Lightning validates and saves for the last time. The last validation,
    the `last` and `best` checkpoints of that step, and the module after `fit` all have the run's anchor. If the syncer
    cannot be reached then, they have this learner's own parameters, and a warning says so. In a run that others have
    started, the process then ends with exit code 1 in place of its own, so that an engine starts it again. A run is one
    fit: a process cannot fit a second time in a run that others have started.

    In addition to the user's metrics, loggers get `diloco/*`, `perf/*` and metrics of the fleet, at the Trainer's
    `log_every_n_steps`. A run that this learner begins has a directory in `<default_root_dir>/diloco`. The directory is
    temporary if `default_root_dir` is a URL, or if it is not given and there is neither a logger nor a checkpoint
    callback. If the last learner of a run that others have started runs no validation at its end, it validates once
    more, for the run's summary.

    Args:
        inner: one of Lightning's strategies, such as `DDPStrategy(...)`, which trains inside this learner; "auto"
            chooses by the Trainer's devices.
        sync_every: H, inner steps between two exchanges of the same fragment, >= 1. Default 24.
        num_fragments: P, 1..sync_every. Default min(24, sync_every), or fewer if the model has fewer slices.
        overlap: tau, steps between snapshot and expected landing, 1..num_fragments. Default 2.
        quorum: contributions a round needs; lowered to the number of learners stepping. Default 1.
        grace: how long a met quorum waits for more, in seconds, or "adaptive", the default.
        merge: "mean" (default), "rda" (the paper's), or "trimmed_mean" or "median" if you trust learners less; see
            `RunConfig`.
        guard: broken learners are found by the "direction" (default) or the "norm" of their contributions; see
            `RunConfig`.
        align: steps trained while a round was in flight: "carry" keeps them (default), "overwrite" drops them, "blend"
            mixes.
        blend_alpha: weight of the local value under "blend", 0..1. Default 0.5.
        outer_lr: outer learning rate, > 0, or "auto", which follows the correlation of successive outer gradients.
            Default: "auto".
        outer_momentum: Nesterov coefficient, 0 <= mu < 1. Default: see `RunConfig`.
        wire: precision on the wire, "int8" (default), "int4", "bf16" or "fp32".
        block_size: elements that share a quantization scale, a power of two, 16..4096. Default 256.
        error_feedback: keep the quantization error for the next contribution. Default True.
        join: join string of a run. Default: DILOCO_JOIN, else a run of its own that others can join.
        learner: learner id. Default: DILOCO_LEARNER, else from the host name.
        token_count_fn: number of tokens of a host batch, finite and >= 0. Default: the sum of an attention mask of
            bools or integers, the size of input_ids, or samples.
        evaluate: validate the "anchor" (default) or the "local" parameters. The last validation sees the parameters
            that `fit` leaves in the module.
        max_fleet_tokens: tokens of all learners at which the whole run ends. Default: no limit.
        anchor_device: on XLA, anchors are beside the parameters ("device", default) or in "host" memory.
        checkpoint_every: inner steps between two checkpoints, from which this learner continues when it is restarted:
            optimizer, schedules, random states, data position, and what callbacks and the module keep by `state_dict`
            and `on_save_checkpoint`. 0: none. Default 100.
        checkpoint_store: folder or fsspec URL of the checkpoints of all learners. Default: in the run directory.
        drain_s: seconds to wait at the end of training until the last contributions are merged. Default: as long as
            they make progress, each within three times the usual time of a round, or a minute; if the syncer cannot be
            reached, ten minutes.
        preemption_s: seconds from SIGTERM to the end of the process, including leaving and a checkpoint. Default 20.

    Raises:
        ConfigError: unknown or contradictory options, all of them at once.
    """

    def __init__(
        self,
        inner: Literal["auto"] | Strategy = "auto",
        *,
        sync_every: int | None = None,
        num_fragments: int | None = None,
        overlap: int | None = None,
        quorum: int | None = None,
        grace: Literal["adaptive"] | float | None = None,
        merge: Merge | None = None,
        guard: Guard | None = None,
        align: Align | None = None,
        blend_alpha: float | None = None,
        outer_lr: Literal["auto"] | float | None = None,
        outer_momentum: float | None = None,
        wire: Wire | None = None,
        block_size: int | None = None,
        error_feedback: bool | None = None,
        join: str | None = None,
        learner: str | None = None,
        token_count_fn: Callable[[Any], int] | None = None,
        evaluate: Evaluate | None = None,
        anchor_device: AnchorDevice | None = None,
        max_fleet_tokens: int | None = None,
        checkpoint_every: int | None = None,
        checkpoint_store: str | None = None,
        drain_s: float | None = None,
        preemption_s: float | None = None,
        **unknown: Any,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "inner", "unknown", "__class__")}
        super().__init__()
        self._run_options, self._learner = resolve({**options, **unknown}, options, inners.problems(inner))
        self._token_count_fn = token_count_fn
        if isinstance(inner, Strategy):
            self._has_inner = True
            self._become(backends.load(type(inner).__name__))
            vars(self).update(vars(inner))
            return
        self.parallel_devices: list[torch.device] | None = None  # Lightning fills these in
        self.cluster_environment: ClusterEnvironment | None = None
        self.num_nodes = 1

    def _configure_launcher(self) -> None:
        final = final_class(self.parallel_devices or [], self.num_nodes)
        self._become(final if isinstance(final, type) else final())
        self._bind()
        self._configure_launcher()  # of the final class

    def _become(self, final: type[DiLoCoHooks]) -> None:
        DecoupledDiLoCoStrategy.register(final)
        self.__class__ = final  # type: ignore[assignment]


# An instance exists before `_bind`, when it does not yet implement Strategy's abstract methods.
DecoupledDiLoCoStrategy.__abstractmethods__ = frozenset()


def final_class(devices: Sequence[torch.device], num_nodes: int) -> type[DiLoCoHooks] | Callable[[], type[DiLoCoHooks]]:
    """Return the final class of a learner with these devices on each node, or a function that returns it.

    Raises:
        ConfigError: a learner cannot have such devices.
    """
    types = sorted({torch.device(device).type for device in devices})
    kind, many = "/".join(types), len(devices) * num_nodes > 1
    key = (kind, many)
    if key not in backends.DEVICES and is_accelerator(kind) and (not many or backends.can_be_ranks(kind)):
        key = (backends.ACCELERATOR, many)
    if key not in backends.DEVICES:
        allowed = ", ".join(f"{'several' if many else 'one'} {kind}" for kind, many in backends.DEVICES)
        raise ConfigError(
            f"this learner has {num_nodes} node(s) with {len(devices)} device(s) each of type {'/'.join(types)}: "
            f"a learner can have {allowed}; pass Trainer(accelerator=..., devices=1, num_nodes=1) and start one "
            "process per device, each a learner of its own"
        )
    return cast("type[DiLoCoHooks]", backends.load(key))
