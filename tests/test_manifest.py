"""The manifest, on which all learners of a run agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_diloco.errors import ConfigError, PlanMismatchError
from lightning_diloco.manifest import ModelDescription, check_model, make_manifest, manifest_file, plan_of

MODEL = ModelDescription({"embedding": (32, 4), "weight": (16, 4)}, frozenset({"embedding"}), {}, "tokens")


def test_plan_and_options_are_restored_from_a_manifest() -> None:
    manifest, plan = make_manifest(MODEL, {"num_fragments": 4, "sync_every": 8})
    again, config = plan_of(manifest)
    assert again == plan
    assert again.digest == manifest["plan_digest"]
    assert (config.sync_every, config.num_fragments, manifest["asked"]) == (8, 4, {})


def test_model_with_few_rows_gets_fewer_fragments_and_the_requested_number_is_kept() -> None:
    small = replace(MODEL, shapes={"embedding": (1, 4)})
    manifest, plan = make_manifest(small, {"num_fragments": 4, "overlap": 3})
    assert plan.num_fragments == manifest["config"]["num_fragments"] == manifest["config"]["overlap"] == 1
    assert manifest["asked"] == {"num_fragments": 4, "overlap": 3}
    assert plan_of(manifest)[0] == plan


def test_one_step_between_exchanges_needs_no_other_option() -> None:
    manifest, plan = make_manifest(MODEL, {"sync_every": 1})
    assert (plan.num_fragments, manifest["config"]["overlap"]) == (1, 1)


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown run option 'sync_evry'"):
        make_manifest(MODEL, {"sync_evry": 3})


def test_up_to_a_dozen_differences_between_models_are_named() -> None:
    manifest, _ = make_manifest(MODEL, {})
    other = replace(MODEL, shapes={"embedding": (32, 5), "extra": (3,)})
    with pytest.raises(PlanMismatchError) as caught:
        check_model(other, manifest)
    text = str(caught.value)
    assert "embedding: [32, 5] here, [32, 4] in the run" in text
    assert "extra: only in this model, [3]" in text
    assert "weight: only in the run's model, [16, 4]" in text
    many = replace(MODEL, shapes={**MODEL.shapes, **{f"p{n}": (1,) for n in range(20)}})
    with pytest.raises(PlanMismatchError, match="and 8 more"):
        check_model(many, manifest)


def test_models_with_other_embeddings_differ() -> None:
    manifest, _ = make_manifest(MODEL, {})
    with pytest.raises(PlanMismatchError, match=r"embeddings: \[\] here, \['embedding'\] in the run"):
        check_model(replace(MODEL, mean_names=frozenset()), manifest)


def test_file_for_users_has_the_software_versions() -> None:
    written = manifest_file(make_manifest(MODEL, {})[0])
    assert written["num_parameters"] == 32 * 4 + 16 * 4
    assert {"python", "torch", "lightning_diloco", "cpu_capability", "protocol"} <= written["versions"].keys()


def test_plan_of_a_manifest_equals_the_seeders_for_any_number_of_slices() -> None:
    model = ModelDescription({"weight": (2, 32), "bias": (2,)}, frozenset(), {}, None)
    manifest, plan = make_manifest(model, {"num_fragments": 24})
    again, config = plan_of(manifest)
    assert again.digest == plan.digest == manifest["plan_digest"]
    assert again.num_fragments == config.num_fragments == manifest["num_fragments"] == 3
    assert manifest["asked"] == {"num_fragments": 24}
