"""Names, shapes and options of a recipe's model, read in seconds on any machine, without the weights.

1. `recipe.py` parses the recipe with LightningCLI.
2. The model is built on the meta device, which needs no memory, accelerator or network. Trainer and data are not built.
3. A run takes the vocabulary size from the data. Here it comes from the data's options.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn

from lightning_diloco.config import Align, AnchorDevice, LearnerConfig, RunConfig
from lightning_diloco.errors import ConfigError
from lightning_diloco.hf.causal_lm import CausalLM
from lightning_diloco.hf.recipe import class_of
from lightning_diloco.strategy.decoupled import final_class
from lightning_diloco.strategy.trainer.parameters import embedding_names, trainable_parameters

_RUN_OPTIONS = tuple(field.name for field in dataclasses.fields(RunConfig))
_TRUE_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64, "64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """The content of a recipe that a plan needs.

    Args:
        shapes: shapes of the trainable parameters; tied parameters appear once.
        mean_names: names of the embeddings among them.
        num_parameters: number of parameters of the whole model.
        run_options: options of the run that the recipe sets.
        align: landing rule of the learners.
        anchor_device: anchor device of the learners.
        accelerator: accelerator as written in the recipe.
        spreads: whether the inner strategy shards the model over a learner's devices.
        devices: devices of one learner on all its nodes; None for "auto".
        param_bytes: bytes per parameter.
        compute_bytes: bytes per activation value.
        max_steps: steps of a learner; None if not fixed.
        batch_size: sequences per process; None if the data has no such option.
        seq_len: tokens per sequence; None if the data has no such option.
        accumulate: micro-batches per step.
        num_layers: decoder layers; None if unknown.
        hidden_size: hidden size of the decoder; None if unknown.
        vocab_size: vocabulary size of the decoder; None if unknown.
    """

    shapes: dict[str, tuple[int, ...]]
    mean_names: frozenset[str]
    num_parameters: int
    run_options: dict[str, Any]
    align: Align
    anchor_device: AnchorDevice
    accelerator: str
    spreads: bool
    devices: int | None
    param_bytes: int
    compute_bytes: int
    max_steps: int | None
    batch_size: int | None
    seq_len: int | None
    accumulate: int
    num_layers: int | None
    hidden_size: int | None
    vocab_size: int | None

    @property
    def num_trainable(self) -> int:
        """Return the number of trainable parameters, which learners exchange."""
        return sum(map(math.prod, self.shapes.values()))


def blueprint(config: Any) -> Blueprint:
    """Read the blueprint of a parsed recipe; builds its model on the meta device.

    Raises:
        ConfigError: the vocabulary size is unknown, or the model has no parameters.
    """
    module = _build(config)
    params = trainable_parameters(module)
    trainer, data = config["trainer"], _init_args(config.get("data"))
    options = _init_args(trainer.get("strategy"))
    decoder = _text_config(module)
    precision = str(trainer.get("precision"))
    param_bytes = _TRUE_DTYPES.get(precision, torch.float32).itemsize
    return Blueprint(
        shapes={name: tuple(p.shape) for name, p in params.items()},
        mean_names=embedding_names(module, params),
        num_parameters=sum(p.numel() for p in module.parameters()),
        run_options={name: options[name] for name in _RUN_OPTIONS if options.get(name) is not None},
        align=options.get("align") or LearnerConfig().align,
        anchor_device=options.get("anchor_device") or LearnerConfig().anchor_device,
        accelerator=str(trainer.get("accelerator") or "auto"),
        spreads=_spreads(options.get("inner")),
        devices=_num_devices(trainer),
        param_bytes=param_bytes,
        compute_bytes=2 if "16" in precision else param_bytes,
        max_steps=trainer.get("max_steps") if (trainer.get("max_steps") or -1) > 0 else None,
        batch_size=data.get("batch_size"),
        seq_len=data.get("seq_len"),
        accumulate=trainer.get("accumulate_grad_batches") or 1,
        num_layers=getattr(decoder, "num_hidden_layers", None),
        hidden_size=getattr(decoder, "hidden_size", None),
        vocab_size=getattr(decoder, "vocab_size", None),
    )


def can_be_built(config: Any) -> bool:
    """Return whether the vocabulary size of a parsed recipe's `CausalLM` is known without its data."""
    return _has_vocabulary(_init_args(config["model"]), _init_args(config.get("data")))


def is_language_model(config: Any) -> bool:
    """Return whether a parsed recipe trains a `CausalLM`."""
    return issubclass(class_of(config["model"]), CausalLM)


def _build(config: Any) -> L.LightningModule:
    """Build the module of a parsed recipe on the meta device."""
    section = config["model"]
    options = _init_args(section)
    module_class = class_of(section)
    if is_language_model(config):
        options = _without_data(options, _init_args(config.get("data")))
    with torch.device("meta"):
        module = module_class(**options)
        module.configure_model()
    if not isinstance(module, L.LightningModule) or not any(True for _ in module.parameters()):
        raise ConfigError(
            f"{module_class.__name__} has no parameters after configure_model(): a plan needs the model's shapes; "
            "create its layers in __init__ or in configure_model, without a trainer"
        )
    return module


def _without_data(options: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return options with which a CausalLM needs neither weights nor a tokenizer."""
    options = {**options, "from_scratch": options.get("name") is not None}
    if not _has_vocabulary(options, data):
        raise ConfigError(
            f"model.config has no vocab_size, and data.tokenizer={data.get('tokenizer')!r} is not loaded for a "
            "plan; set vocab_size in model.config to at least the tokenizer's number of tokens"
        )
    if (config := options.get("config")) is not None and "vocab_size" not in config:
        # None, because the defaults of a family, such as phi3, may lie outside of this vocabulary.
        special = {f"{kind}_token_id": None for kind in ("bos", "eos", "pad")}
        options["config"] = {"vocab_size": data["vocab_size"], **special, **config}
    return options


def _has_vocabulary(options: dict[str, Any], data: dict[str, Any]) -> bool:
    config = options.get("config")
    return config is None or "vocab_size" in config or (data.get("tokenizer") is None and "vocab_size" in data)


def instantiate(section: Any) -> Any:
    """Build the object of a `class_path` section; return None if there is no section."""
    if section is None:
        return None
    parser = LightningArgumentParser()
    owner = L.LightningModule if issubclass(class_of(section), L.LightningModule) else L.LightningDataModule
    parser.add_lightning_class_args(owner, "made", subclass_mode=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parser.instantiate_classes(parser.parse_object({"made": section})).made


@contextmanager
def default_dtype(precision: object) -> Iterator[None]:
    """Give new parameters in the context the dtype of a Trainer with this precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(_TRUE_DTYPES.get(str(precision), before))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _init_args(section: Any) -> dict[str, Any]:
    """Return the options of a `class_path` section as plain values; empty for any other value."""
    init_args = section.get("init_args") if hasattr(section, "get") else None
    return dict(init_args.as_dict() if hasattr(init_args, "as_dict") else init_args or {})


def _spreads(inner: Any) -> bool:
    class_path = inner.get("class_path", "") if hasattr(inner, "get") else ""
    return str(class_path).endswith(("ModelParallelStrategy", "FSDPStrategy"))


def _text_config(module: nn.Module) -> Any:
    model = getattr(module, "model", None)
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _num_devices(trainer: Any) -> int | None:
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes") or 1
    if isinstance(devices, str) and devices.strip("-").isdigit():
        devices = int(devices)
    if isinstance(devices, (list, tuple)):
        devices = len(devices)
    return devices * nodes if isinstance(devices, int) and devices > 0 else None


def strategy_problem(accelerator: str, devices: int, spreads: bool) -> str | None:
    """Return why a learner on these devices is not supported, or None; `spreads`: its model is sharded over them."""
    # Accelerators of which torch may know nothing on this machine have the same classes as CUDA.
    kinds = {"gpu": "cuda", "tpu": "xla", "auto": "cpu", "torch": "cuda", "torch_tpu": "cuda"}
    kind = kinds.get(accelerator, accelerator)
    try:
        final_class([torch.device(kind, index) for index in range(devices)], 1)
    except ConfigError as error:
        return str(error)
    if devices > 1 and kind in ("cpu", "cuda") and not spreads:
        return (
            f"Trainer(devices={devices}) trains with DDP inside, where each device holds the whole model with its "
            "optimizer and anchors; to shard them, give the strategy inner=ModelParallelStrategy(data_parallel_size="
            f"{devices}, tensor_parallel_size=1), for which hf.CausalLM shards its layers"
        )
    return None
