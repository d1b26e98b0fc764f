"""LightningModule for any causal language model of transformers.

1. The model is built in `configure_model`, where the trainer's device, precision and tokenizer are known.
2. Parameters get the trainer's dtype, never that of the published weights, because AdamW in bfloat16 loses small
   updates.
3. If the config has no vocabulary size or special tokens, they come from the tokenizer and are saved in the
   hyperparameters, so that a checkpoint can be loaded without the data.
4. With `ModelParallelStrategy` (`inner=`), decoder layers are sharded (FSDP2) over the devices of a learner.
5. Validation averages over tokens, not over batches, so that a short last batch has the right weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Module
from torch.nn import functional as F
from torchmetrics import Metric
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_diloco.errors import ConfigError, did_you_mean
from lightning_diloco.hf import adapters
from lightning_diloco.hf.families import check_causal
from lightning_diloco.hf.hub import fetched
from lightning_diloco.strategy.trainer.lr_schedules import FleetTokenLR, warmup_cosine

Schedule = Literal["cosine", "constant"]
Batch = dict[str, Tensor]

IGNORED_LABEL = -100
ROUTER_LOGITS = "output_router_logits"  # the option with which a mixture of experts computes its balancing term


class CausalLM(L.LightningModule):
    """Train a causal language model, new or pretrained.

    A batch is a dict of the model's inputs, int64 of shape (batch, seq_len): `input_ids`, `labels` (equal to the
    input; the model shifts them; -100 is ignored) and, unless packed, `attention_mask`.
    Logs `train/loss`, `val/loss` (nats per token) and `val/perplexity`.

    Args:
        name: hub name or local path of a model; give this or `config`.
        config: `model_type` and any other fields of that model's config; the weights are random. Missing
            `vocab_size`, `bos_token_id`, `eos_token_id` and `pad_token_id` come from the datamodule's tokenizer.
            A new mixture of experts trains with its balancing term, unless `output_router_logits` is False.
        from_scratch: with `name`, use only its config and start from random weights.
        adapter: freeze the model and train only this adapter, given as fields of a PEFT config, such as
            {"r": 8, "target_modules": "all-linear"}. The default `peft_type` is LoRA. None: train everything.
        lr: peak learning rate of AdamW, > 0.
        weight_decay: decoupled weight decay of matrices, >= 0; not applied to norms and biases.
        betas: AdamW's averaging coefficients, each in [0, 1).
        warmup_steps: optimizer steps of linear warm-up, >= 0.
        schedule: after warm-up, "cosine" decays to `final_lr_fraction` of the peak at the trainer's last step,
            "constant" keeps the peak.
        final_lr_fraction: final learning rate of the cosine as a fraction of `lr`, 0..1.
        schedule_tokens: schedule by the tokens of the whole fleet and end the cosine at this number. A learner that
            joins late then starts with the run's current learning rate. None: schedule by this learner's steps.
        warmup_tokens: tokens of linear warm-up; replaces `warmup_steps` if `schedule_tokens` is set.
        attn_implementation: as in transformers, such as "sdpa" or "eager"; None: the default of transformers.

    Raises:
        ConfigError: invalid options; the error names all of them.
    """

    def __init__(
        self,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        *,
        from_scratch: bool = False,
        adapter: dict[str, Any] | None = None,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 0,
        schedule: Schedule = "cosine",
        final_lr_fraction: float = 0.1,
        schedule_tokens: int | None = None,
        warmup_tokens: int = 0,
        attn_implementation: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if problems := _problems(self.hparams):
            raise ConfigError(problems)
        self.model: torch.nn.Module | None = None  # annotated as PeftModel, it would make the command line import peft
        self.val_loss = _TokenLoss()
        self.val_perplexity = _Perplexity()

    def configure_model(self) -> None:
        """Build the model once; Lightning calls this before training and before it loads a checkpoint.

        Raises:
            ConfigError: the vocabulary size is unknown, or smaller than the tokenizer's; or the model is not causal.
        """
        if self.model is not None:
            return
        tokenizer = getattr(getattr(self._trainer, "datamodule", None), "tokenizer", None)
        if self.hparams.config is not None:
            self.hparams["config"] = _completed(self.hparams.config, tokenizer)
        model = self._build().train()  # from_pretrained returns eval mode, and Lightning keeps the mode
        check_causal(model.config)
        if self.hparams.name is None or self.hparams.from_scratch:
            _balance_experts(model.config, self.hparams.config)
        if model.loss_type is None:  # a class name that transformers cannot read, such as GPT2LMHeadModel
            model.loss_type = "ForCausalLM"
        if tokenizer is not None:
            _check_vocabulary(model, tokenizer)
        adapter = self.hparams.adapter
        self.model = model if adapter is None else adapters.add_adapter(model, adapter)
        if isinstance(getattr(self._trainer, "strategy", None), ModelParallelStrategy):
            _shard(self.model, self.device_mesh)

    def _build(self) -> PreTrainedModel:
        hparams = self.hparams
        options = {"dtype": torch.get_default_dtype()}
        if hparams.attn_implementation is not None:
            options["attn_implementation"] = hparams.attn_implementation
        if hparams.name is not None and not hparams.from_scratch:
            with fetched("name", hparams.name):
                return AutoModelForCausalLM.from_pretrained(hparams.name, use_cache=False, **options)
        return AutoModelForCausalLM.from_config(self._config(), **options)

    def _config(self) -> PreTrainedConfig:
        if self.hparams.name is not None:
            with fetched("name", self.hparams.name):
                return AutoConfig.from_pretrained(self.hparams.name, use_cache=False)
        return AutoConfig.for_model(**{"use_cache": False, **self.hparams.config})

    def forward(self, **batch: Tensor) -> Any:
        """Return the model's output: `logits` of shape (batch, seq_len, vocab_size) and, with labels, `loss`."""
        return self.model(**batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the model's loss, which includes the balancing term for mixtures of experts."""
        loss = self(**batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Update the validation loss with the cross-entropy of all labels that are not ignored."""
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = self(**inputs).logits[:, :-1].flatten(0, 1).float()
        labels = batch["labels"][:, 1:].flatten()
        nats = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
        num_tokens = (labels != IGNORED_LABEL).sum()
        self.val_loss.update(nats, num_tokens)
        self.val_perplexity.update(nats, num_tokens)
        self.log("val/loss", self.val_loss, prog_bar=True)
        self.log("val/perplexity", self.val_perplexity)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW and a schedule that advances at every optimizer step.

        Raises:
            ConfigError: `schedule="cosine"`, but the number of steps is unknown.
        """
        hparams = self.hparams
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": hparams.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=hparams.lr, betas=tuple(hparams.betas))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self._schedule(optimizer), "interval": "step"}}

    def _schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        # Imported here, because these import peft, which a plan does not need.
        from transformers import get_constant_schedule_with_warmup, get_cosine_with_min_lr_schedule_with_warmup

        hparams = self.hparams
        if hparams.schedule_tokens is not None:
            final = hparams.final_lr_fraction if hparams.schedule == "cosine" else 1.0
            factor = warmup_cosine(warmup=hparams.warmup_tokens, total=hparams.schedule_tokens, final=final)
            return FleetTokenLR(optimizer, factor, self.trainer)
        if hparams.schedule == "constant":
            return get_constant_schedule_with_warmup(optimizer, hparams.warmup_steps)
        num_steps = self.trainer.estimated_stepping_batches
        if not 0 < num_steps < float("inf"):
            raise ConfigError(
                'schedule="cosine" without an end: the trainer has no max_steps and its number of steps is unknown; '
                'set trainer.max_steps, or schedule="constant"'
            )
        return get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, hparams.warmup_steps, int(num_steps), min_lr_rate=hparams.final_lr_fraction
        )


class _TokenLoss(Metric):
    """Nats per token over batches and ranks, summed in float32 whatever the module's dtype.

    MeanMetric of torchmetrics does not fit: it checks for NaN on the host in every step, and without that check it
    ignores the weights.
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.tensor(0.0, dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("num_tokens", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, nats: Tensor, num_tokens: Tensor) -> None:
        self.nats += nats
        self.num_tokens += num_tokens

    def compute(self) -> Tensor:
        return self.nats / self.num_tokens

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ()) -> Module:
        """Move the states, and keep their dtype: precision="bf16-true" casts the whole module."""
        return super()._apply(lambda t: fn(t).to(t.dtype), exclude_state)


class _Perplexity(_TokenLoss):
    """The exponential of nats per token."""

    def compute(self) -> Tensor:
        return super().compute().exp()


def _shard(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model with FSDP2: each of its `_no_split_modules` separately, and the rest together.

    Raises:
        ConfigError: the mesh has a tensor parallel dimension above 1.
    """
    if mesh["tensor_parallel"].size() > 1:
        raise ConfigError(
            f"tensor_parallel_size={mesh['tensor_parallel'].size()}: must be 1, because CausalLM is sharded (FSDP2) "
            "and has no tensor parallel plan; set data_parallel_size to the number of devices"
        )
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in [module for module in model.modules() if type(module).__name__ in names]:
        fully_shard(module, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])


def _completed(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Return the config, with missing values taken from the tokenizer."""
    if tokenizer is not None:
        special = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
        return {"vocab_size": len(tokenizer), **special, **config}
    if "vocab_size" not in config:
        raise ConfigError(
            "config has no vocab_size and there is no datamodule with a tokenizer to take it from; "
            "set vocab_size in config, or fit with a datamodule such as lightning_diloco.hf.TextData"
        )
    return dict(config)


def _balance_experts(config: PreTrainedConfig, given: dict[str, Any] | None) -> None:
    """Let a mixture of experts add its balancing term to the loss, unless the given config says otherwise."""
    decoder = config.get_text_config()
    if hasattr(decoder, ROUTER_LOGITS) and ROUTER_LOGITS not in (given or {}):
        setattr(decoder, ROUTER_LOGITS, True)


def _check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    num_rows = model.get_input_embeddings().num_embeddings
    if num_rows < len(tokenizer):
        raise ConfigError(
            f"the model's vocab_size is {num_rows}, the tokenizer has {len(tokenizer)} tokens: vocab_size must be at "
            "least the number of tokens; remove vocab_size from the model's config, or use the model's own tokenizer"
        )


def _problems(hparams: Any) -> list[str]:
    """Return one sentence per invalid option."""
    checks = {
        f"lr={hparams.lr!r}: must be above 0": hparams.lr > 0,
        f"weight_decay={hparams.weight_decay!r}: must be at least 0": hparams.weight_decay >= 0,
        f"betas={hparams.betas!r}: must be two numbers of at least 0 and below 1": len(hparams.betas) == 2
        and all(0 <= beta < 1 for beta in hparams.betas),
        f"warmup_steps={hparams.warmup_steps!r}: must be at least 0": hparams.warmup_steps >= 0,
        f"schedule={hparams.schedule!r}: must be one of {', '.join(map(repr, get_args(Schedule)))}": hparams.schedule
        in get_args(Schedule),
        f"final_lr_fraction={hparams.final_lr_fraction!r}: must be from 0 to 1": 0 <= hparams.final_lr_fraction <= 1,
    }
    if hparams.schedule_tokens is not None:
        checks |= {
            f"schedule_tokens={hparams.schedule_tokens!r}: must be above warmup_tokens={hparams.warmup_tokens!r}, "
            "which is at least 0": hparams.schedule_tokens > hparams.warmup_tokens >= 0,
            f"warmup_steps={hparams.warmup_steps!r} with schedule_tokens: must be 0; "
            "set warmup_tokens": hparams.warmup_steps == 0,
        }
    else:
        checks[f"warmup_tokens={hparams.warmup_tokens!r}: must be 0 without schedule_tokens; set schedule_tokens"] = (
            hparams.warmup_tokens == 0
        )
    of_adapter = [] if hparams.adapter is None else adapters.problems(hparams.adapter)
    return [*_model_problems(hparams), *of_adapter, *(sentence for sentence, holds in checks.items() if not holds)]


def _model_problems(hparams: Any) -> list[str]:
    if (hparams.name is None) == (hparams.config is None):
        given = "neither" if hparams.name is None else "both"
        return [f"{given} of name and config given: give one, such as config={{'model_type': 'llama'}}"]
    if hparams.config is None:
        return []
    model_type = hparams.config.get("model_type")
    if model_type in CONFIG_MAPPING:
        return _misspelt(hparams.config, CONFIG_MAPPING[model_type]())
    return [f"config.model_type={model_type!r}: must be a model type of transformers, such as 'llama' or 'gpt2'"]


def _misspelt(config: dict[str, Any], known: PreTrainedConfig) -> list[str]:
    """Return a sentence for each unknown field, which transformers would ignore, that resembles a known field."""
    names = {*known.to_dict(), *known.attribute_map}
    near = {name: did_you_mean(name, names, cutoff=0.75) for name in config if not hasattr(known, name)}
    return [
        f"config.{name}={config[name]!r}: a {known.model_type} model has no such field; {question}"
        for name, question in near.items()
        if question
    ]
