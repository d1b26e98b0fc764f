"""The strategy users name, and how it becomes the right one.

Lightning builds a strategy before it tells it the accelerator, and decides by isinstance checks against its own
strategy classes. So the bare class only holds options. `_configure_launcher` is the last thing the Trainer calls while
it puts a strategy together; there the object takes the final class that fits its devices: the hooks before one of
Lightning's strategies (`backends/`). All checks Lightning makes come later and see that class. It is registered as a
subclass of the bare one, so that `isinstance` still says what users expect. (An outer strategy that delegates to an
inner one does not work: Lightning's optimizers are bound to the inner, so the outer never sees a step.)

To support more devices, add a final class and its line in `backends.FINAL_CLASSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import Strategy

from lightning_diloco.config import Align, AnchorDevice, Evaluate, Guard, Merge, Wire
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy import backends
from lightning_diloco.strategy import inner as inners
from lightning_diloco.strategy.hooks import DiLoCoHooks
from lightning_diloco.strategy.options import resolve


class DecoupledDiLoCoStrategy(DiLoCoHooks):
    """Train one model together with learners far away: `Trainer(strategy=DecoupledDiLoCoStrategy(...))`.

    Every option has a default that works. An unset one (None) is adopted from the run that is joined, or takes its
    default when the run is new; an explicit run option must agree with the run. Nothing is opened before `fit`.

    What is contributed are the parameters as they are when an inner step ends. On a CPU they are copied until the next
    update by an optimizer of the Trainer: code of yours that changes them elsewhere may be in it with some values, and
    with the others in the next contribution. Nothing is lost, or counted twice.

    Exchanged are trainable parameters, and those that a finetuning callback, or whoever gave them to an optimizer, may
    unfreeze. Frozen parameters must be built alike everywhere. All other state of the module is each learner's own:
    statistics of BatchNorm, teachers that follow a student, queues, codebooks. So two learners with the same anchor may
    validate it differently; GroupNorm or LayerNorm have no such statistics, and `torch.optim.swa_utils.update_bn` makes
    those of the anchor. A learner that comes back has its own state from its checkpoint, a newcomer that of a peer.

    The run is left when the last step is done, before Lightning validates and saves for the last time: that validation,
    `last` and `best` checkpoints of that step, and the module after `fit` are the same, the run's anchor. If the syncer
    cannot be reached then, they are this learner's own parameters, and a warning says so. A run is one fit: a process
    that has trained in a run that others have started is refused when it fits again.

    Other than with Lightning's strategies, loggers also get `diloco/*`, `perf/*` and figures of the fleet, at the
    Trainer's `log_every_n_steps`. A run that this learner begins has a directory in `<default_root_dir>/diloco`; a
    temporary one if `default_root_dir` is a URL, or if it is not given and there is neither logger nor checkpoint. If
    the last learner of a run that others have started runs no validation at its end, it validates once more, for the
    run's summary.

    Args:
        inner: what trains inside this learner: one of Lightning's strategies, such as `DDPStrategy(...)`; "auto" takes
            what fits the Trainer's devices.
        sync_every: H, inner steps between two exchanges of the same fragment, >= 1. Default 24.
        num_fragments: P, 1..sync_every. Default min(24, sync_every), or fewer where the model has fewer slices.
        overlap: tau, steps between snapshot and expected landing, 1..num_fragments. Default 2.
        quorum: contributions a round needs; lowered to the number of learners stepping. Default 1.
        grace: how long a met quorum waits for more, in seconds, or "adaptive", the default.
        merge: "mean" (default), "rda", the paper's, or "trimmed_mean" or "median", where you trust learners less; see
            `RunConfig`.
        guard: broken learners are found by "direction" (default) or "norm" of what they send; see `RunConfig`.
        align: steps trained while a round was in flight: "carry" keeps them (default), "overwrite" drops them, "blend"
            mixes.
        blend_alpha: weight of the local value under "blend", 0..1. Default 0.5.
        outer_lr: outer learning rate, > 0. Default: see `RunConfig`.
        outer_momentum: Nesterov coefficient, 0 <= mu < 1. Default: see `RunConfig`.
        wire: precision on the wire, "int8" (default), "int4", "bf16" or "fp32".
        block_size: elements that share a quantization scale, a power of two, 16..4096. Default 256.
        error_feedback: keep what quantization lost for the next contribution. Default True.
        join: join string of a run. Default: DILOCO_JOIN, else a run of its own that others can join.
        learner: learner id. Default: DILOCO_LEARNER, else from the host name.
        token_count_fn: number of tokens of a host batch. Default: attention mask, input_ids, or samples.
        evaluate: validate the "anchor" (default) or the "local" parameters. The last validation sees what `fit` leaves
            in the module.
        max_fleet_tokens: end the whole run when all learners together have seen so many tokens. Default: no.
        anchor_device: XLA: anchors beside the parameters ("device", default) or in "host" memory.
        checkpoint_every: inner steps between two checkpoints from which this learner, started again, goes on:
            optimizer, schedules, random numbers and position. 0: none. Default 100.
        checkpoint_store: folder or fsspec URL of the checkpoints of all learners. Default: in the run directory.
        drain_s: seconds to wait at the end of training for the last contributions to be merged. Default: as long as
            they get on, one after the other, within three times what a round has usually taken, or a minute.
        preemption_s: how long after SIGTERM the process has ended, its leave and a checkpoint included. Default 20.

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
        outer_lr: float | None = None,
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
        self._run_options, self._learner = resolve(options, unknown, inners.problems(inner))
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


# An instance exists before it is bound, when it cannot yet do what Strategy declares abstract.
DecoupledDiLoCoStrategy.__abstractmethods__ = frozenset()


def final_class(devices: Sequence[torch.device], num_nodes: int) -> type[DiLoCoHooks] | Callable[[], type[DiLoCoHooks]]:
    """The final class of a learner with these devices on each of its nodes, or a function that finds it there.

    Raises:
        ConfigError: a learner cannot have such devices.
    """
    types = sorted({torch.device(device).type for device in devices})
    key = ("/".join(types), len(devices) * num_nodes > 1)
    if key not in backends.DEVICES:
        allowed = ", ".join(f"{'several' if many else 'one'} {kind}" for kind, many in backends.DEVICES)
        if types == ["mps"]:
            raise ConfigError(
                'this learner would train on a device of type mps, which accelerator="auto" picks on Apple silicon: a '
                f'learner can have {allowed}; pass Trainer(accelerator="cpu")'
            )
        raise ConfigError(
            f"this learner has {num_nodes} node(s) with {len(devices)} device(s) each of type {'/'.join(types)}: "
            f"a learner can have {allowed}; pass Trainer(accelerator=..., devices=1, num_nodes=1) and start one "
            "process per device, each a learner of its own"
        )
    return cast("type[DiLoCoHooks]", backends.load(key))
