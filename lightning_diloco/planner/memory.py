"""Memory of a learner's devices and host, of the syncer, and of the syncer's disk.

The items are the allocations of the code, plus two estimates: activations kept by autograd, and optimizer state.
Everything else (allocator, kernels, data loader, Python) is not counted.

1. A learner's anchors are float32. Each fragment has a buffer as long as the largest fragment; a few more are spare.
2. A learner with N devices shards parameters, gradients, optimizer state and anchors evenly over them.
3. The syncer holds 12 bytes per parameter, the last three updates, and the data of each open round. While a snapshot is
   being written, its state stays in memory next to the state of later commits.

Source: devices/dense.py, syncer/anchors.py and storage/snapshots.py; activations after arXiv 2205.05198.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_diloco.config import CHAIN_LENGTH, Align, AnchorDevice, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import wire_nbytes

Items = dict[str, int]

SPARE_BUFFERS = 4
ROUNDS_IN_FLIGHT = 2
MIN_LOG_BYTES = 8 << 20
_ACTIVATION_BYTES = 17  # per layer and element of batch x sequence x hidden size, in units of compute_bytes
_FLOAT32_BYTES = 4
_STATE_BYTES = 3 * _FLOAT32_BYTES  # master, published, momentum


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training job of one learner.

    Args:
        num_parameters: parameters of the model; tied ones count once.
        num_trainable: parameters that are exchanged.
        param_bytes: bytes per parameter, and per gradient value.
        compute_bytes: bytes per activation value.
        moments: optimizer values per trainable parameter.
        devices: devices of one learner, on one host.
        spreads: whether each process builds the whole model in host memory and then keeps only its shard.
        batch_size: sequences per device and micro-batch; None if unknown.
        seq_len: tokens per sequence; None if unknown.
        accumulate: micro-batches per step.
        num_layers: decoder layers; None if activations cannot be estimated.
        hidden_size: hidden size; None as above.
        vocab_size: vocabulary size; None as above.
        align: landing rule; all but "carry" keep a residual per parameter.
        anchor_device: where a learner keeps its anchors.
    """

    num_parameters: int
    num_trainable: int
    param_bytes: int = 4
    compute_bytes: int = 4
    moments: int = 2
    devices: int = 1
    spreads: bool = False
    batch_size: int | None = None
    seq_len: int | None = None
    accumulate: int = 1
    num_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    align: Align = "carry"
    anchor_device: AnchorDevice = "device"

    @property
    def tokens_per_step(self) -> int | None:
        """Return the tokens of one inner step of one learner; None if the batch is unknown."""
        if self.batch_size is None or self.seq_len is None:
            return None
        return self.batch_size * self.seq_len * self.accumulate * self.devices


@dataclass(frozen=True, slots=True)
class FragmentSizes:
    """Lengths and bytes of a plan's fragments.

    Args:
        numel: largest padded length.
        total_numel: sum of padded lengths.
        nbytes: bytes of the largest fragment on the wire.
        total_nbytes: bytes of all fragments on the wire.
        count: P.
    """

    numel: int
    total_numel: int
    nbytes: int
    total_nbytes: int
    count: int

    @classmethod
    def of(cls, plan: FragmentPlan, config: RunConfig) -> FragmentSizes:
        """Compute the sizes for the config's wire precision and block size."""
        numels = [plan.layout(p, config.block_size).padded_numel for p in range(plan.num_fragments)]
        wired = [wire_nbytes(numel, config.wire, config.block_size) for numel in numels]
        return cls(max(numels), sum(numels), max(wired), sum(wired), len(numels))


def device_bytes(sizes: FragmentSizes, training: Training) -> Items:
    """Return the bytes on each device of a learner, by item."""
    shared: Items = {
        "parameters": training.num_parameters * training.param_bytes,
        "gradients": training.num_trainable * training.param_bytes,
        "optimizer": training.num_trainable * training.param_bytes * training.moments,
        "anchors": _anchor_bytes(sizes) if training.anchor_device == "device" else 0,
        "exchange buffers": _FLOAT32_BYTES * SPARE_BUFFERS * sizes.numel + sizes.nbytes,
        "copy while validating": training.num_trainable * training.param_bytes,
    }
    if training.align != "carry":
        shared["residuals"] = _anchor_bytes(sizes)
    return {name: nbytes // training.devices for name, nbytes in shared.items()} | _activations(training)


def _anchor_bytes(sizes: FragmentSizes) -> int:
    return _FLOAT32_BYTES * sizes.count * sizes.numel


def _activations(training: Training) -> Items:
    """Estimate activations and logits of a decoder with fused attention and without recomputation."""
    t = training
    if None in (t.batch_size, t.seq_len, t.num_layers, t.hidden_size, t.vocab_size):
        return {}
    assert t.batch_size and t.seq_len and t.num_layers and t.hidden_size and t.vocab_size
    tokens = t.batch_size * t.seq_len
    layers = _ACTIVATION_BYTES * t.compute_bytes * tokens * t.hidden_size * t.num_layers
    logits = (t.compute_bytes + 2 * _FLOAT32_BYTES) * tokens * t.vocab_size  # plus a float32 copy and its gradient
    return {"activations": layers, "logits": logits}


def host_bytes(sizes: FragmentSizes, training: Training, overlap: int) -> Items:
    """Return the bytes on a learner's host, by item, without device memory."""
    return {
        "anchors": _anchor_bytes(sizes) if training.anchor_device == "host" else 0,
        "on the wire": (overlap + 1) * 2 * sizes.nbytes,
        "one full fragment": _FLOAT32_BYTES * sizes.numel,
        "checkpoint copies": training.moments * training.num_trainable * training.param_bytes,
        "model while it is built": training.spreads * training.devices * training.num_parameters * training.param_bytes,
    }


def syncer_bytes(sizes: FragmentSizes, *, num_learners: int, replaced: float, part: float = 1.0) -> Items:
    """Return the bytes in the syncer's memory, by item.

    Args:
        sizes: sizes of the fragments.
        num_learners: M.
        replaced: share of the fragments that commits replace while a snapshot is being written, 0..1.
        part: share of the fragments that this machine holds, 0..1.
    """
    per_round = (2 + _STATE_BYTES) * sizes.numel + num_learners * sizes.nbytes
    return {
        "master, published, momentum": int(part * _STATE_BYTES * sizes.total_numel),
        "last updates": int(part * CHAIN_LENGTH * sizes.total_nbytes),
        "open rounds": ROUNDS_IN_FLIGHT * per_round,
        "snapshot being written": int(part * replaced * _STATE_BYTES * sizes.total_numel)
        + 2 * _STATE_BYTES * sizes.numel,
    }


def snapshot_bytes(sizes: FragmentSizes) -> int:
    """Return the size of one snapshot on disk."""
    return _STATE_BYTES * sizes.total_numel + CHAIN_LENGTH * sizes.total_nbytes


def disk_bytes(sizes: FragmentSizes, *, replaced: float, part: float = 1.0) -> Items:
    """Return the bytes on the syncer's disk, by item.

    A snapshot is due when the log is as large as the state. There can be three snapshots: the one that the log
    continues, one from a clean stop, and the next one while it is being written.
    """
    state = max(MIN_LOG_BYTES, int(part * _STATE_BYTES * sizes.total_numel))
    return {
        "redo log": state + int(part * replaced * 2 * sizes.total_numel),
        "three snapshots": int(part * 3 * snapshot_bytes(sizes)),
    }
