"""The manifest, on which all learners of a run must agree, and the plan that follows from it."""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

import torch

from lightning_diloco.config import PROTOCOL_VERSION, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.errors import PlanMismatchError
from lightning_diloco.transport.base import Json

MAX_SHOWN = 12
TokenUnit = Literal["tokens", "samples"]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The properties of a learner's model on which all learners must agree.

    Args:
        shapes: shape of every trainable parameter by name; tied weights once.
        mean_names: names in shapes merged by the plain mean: embeddings and heads tied to them.
        frozen_digest: SHA-256 in hex by name, of frozen parameters.
        token_unit: unit that training steps count; None until the first batch shows it.
        copies: names of frozen parameters that are copies of trained ones, such as teachers, with the names of those.
            Their values may differ between learners.
        built: description of the model before a checkpoint was loaded; None if none was loaded.
    """

    shapes: dict[str, tuple[int, ...]]
    mean_names: frozenset[str]
    frozen_digest: dict[str, str]
    token_unit: TokenUnit | None
    copies: Mapping[str, str] = field(default_factory=dict)
    built: ModelDescription | None = None

    def differing(self, frozen: Mapping[str, str]) -> set[str]:
        """Return the names of frozen parameters that differ from the run's, whether or not the difference matters.

        Args:
            frozen: digests by name of the model that the run's first learner built.
        """
        return {
            name
            for name in self.frozen_digest.keys() | frozen.keys()
            if self.frozen_digest.get(name) != frozen.get(name)
        }

    def confirmed(self, frozen: Mapping[str, str]) -> dict[str, str]:
        """Return the digests of frozen parameters for `Confirm`, with the run's own digest if a difference is allowed.

        A difference is allowed for copies, and for parameters that equaled the run's before a checkpoint was loaded,
        because training may change frozen parameters.

        Args:
            frozen: see `differing`.
        """
        own = self.copies.keys() | (self.built.copies.keys() if self.built else set())
        built = self.built.frozen_digest if self.built else {}
        return {
            name: frozen[name] if name in frozen and (name in own or built.get(name) == frozen[name]) else digest
            for name, digest in self.frozen_digest.items()
        }


def make_manifest(model: ModelDescription, options: Mapping[str, Any]) -> tuple[Json, FragmentPlan]:
    """Make the manifest of a run from the seeder's model and the explicit options.

    Args:
        model: the seeder's model.
        options: explicit run options of the syncer and of the seeder.

    Returns:
        The manifest and the plan. All learners draw the order of the data from its data seed, which is the seeder's
        random seed. Its `num_fragments` and `overlap` are lowered to the values that the model allows. "asked" holds
        the requested values of options that were lowered.

    Raises:
        ConfigError: options are unknown or contradict each other.
    """
    asked = config = RunConfig.from_dict(options)
    plan = _plan(model.shapes, model.mean_names, asked)
    # Fewer fragments may mean larger slices, and so even fewer fragments: repeat until the number no longer changes.
    while config.num_fragments != plan.num_fragments:
        overlap = min(asked.overlap, plan.num_fragments)
        config = dataclasses.replace(asked, num_fragments=plan.num_fragments, overlap=overlap)
        plan = _plan(model.shapes, model.mean_names, config)
    reduced = {"num_fragments": asked.fragments_wanted, "overlap": asked.overlap}
    manifest: Json = {
        "data_seed": torch.initial_seed() % 2**63,
        "config": config.to_dict(),
        "asked": {name: value for name, value in reduced.items() if value != getattr(config, name)},
        "shapes": {name: list(shape) for name, shape in sorted(model.shapes.items())},
        "mean_names": sorted(model.mean_names),
        "frozen": dict(model.frozen_digest),
        "token_unit": model.token_unit,
        "plan_digest": plan.digest,
        "num_fragments": plan.num_fragments,
    }
    return manifest, plan


def plan_of(manifest: Json) -> tuple[FragmentPlan, RunConfig]:
    """Return the plan and the options of a manifest."""
    config = RunConfig.from_dict(manifest["config"])
    shapes = {name: tuple(shape) for name, shape in manifest["shapes"].items()}
    return _plan(shapes, frozenset(manifest["mean_names"]), config), config


def check_model(model: ModelDescription, manifest: Json) -> None:
    """Compare the model of a joining learner with the run's.

    Raises:
        PlanMismatchError: names or shapes differ; the message lists the differences.
    """
    mine = {name: list(shape) for name, shape in model.shapes.items()}
    theirs: Mapping[str, list[int]] = manifest["shapes"]
    lines = [f"{name}: only in this model, {mine[name]}" for name in sorted(mine.keys() - theirs.keys())]
    lines += [f"{name}: only in the run's model, {theirs[name]}" for name in sorted(theirs.keys() - mine.keys())]
    lines += [
        f"{name}: {mine[name]} here, {theirs[name]} in the run"
        for name in sorted(mine.keys() & theirs.keys())
        if mine[name] != theirs[name]
    ]
    if sorted(model.mean_names) != manifest["mean_names"] and not lines:
        lines.append(f"embeddings: {sorted(model.mean_names)} here, {manifest['mean_names']} in the run")
    if lines:
        more = [f"and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
        shown = "\n  ".join(lines[:MAX_SHOWN] + more)
        raise PlanMismatchError(
            f"this model is not the model of the run; its trainable parameters differ:\n  {shown}\n"
            "All learners of a run train the same model; use the same code and config, or start another run."
        )


def _plan(shapes: Mapping[str, tuple[int, ...]], mean_names: frozenset[str], config: RunConfig) -> FragmentPlan:
    return FragmentPlan.balanced(
        shapes,
        num_fragments=config.fragments_wanted,
        max_slice_numel=config.max_slice_numel,
        mean_names=mean_names,
    )


def manifest_file(manifest: Json) -> Json:
    """Return the manifest with parameter count and software versions, for users in RUN_DIR/manifest.json."""
    return {
        **manifest,
        "num_parameters": sum(math.prod(shape) for shape in manifest["shapes"].values()),
        "versions": {
            "lightning_diloco": _version("lightning-diloco"),
            "protocol": PROTOCOL_VERSION,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None  # run from a source tree
