"""The plan has every element once, is balanced and has few signatures; the flat vector of a fragment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from math import ceil, prod
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_diloco.core.fragments import FragmentPlan, Slice, gather, scatter
from lightning_diloco.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]

_shape = st.lists(st.integers(1, 9), max_size=3).map(tuple)
_names = st.sampled_from([f"layer.{k}.weight" for k in range(30)])
_models = st.dictionaries(_names, _shape, min_size=1, max_size=20)


def rows_of(plan: FragmentPlan) -> dict[str, list[tuple[int, int]]]:
    found = defaultdict(list)
    for fragment in plan.fragments:
        for s in fragment:
            found[s.name].append((s.start_row, s.stop_row))
    return {name: sorted(rows) for name, rows in found.items()}


@pytest.mark.seconds
@settings(derandomize=True, deadline=None, max_examples=150)
@given(_models, st.integers(1, 12), st.integers(1, 200))
def test_plan_holds_every_row_once_and_is_balanced(shapes: Shapes, num_fragments: int, max_slice_numel: int) -> None:
    plan = FragmentPlan.balanced(shapes, num_fragments=num_fragments, max_slice_numel=max_slice_numel)
    for name, rows in rows_of(plan).items():
        num_rows = shapes[name][0] if shapes[name] else 1
        bounds = [rows[0][0], *(stop for _, stop in rows)]
        assert rows == list(pairwise(bounds))
        assert (bounds[0], bounds[-1]) == (0, num_rows)
        sizes = [stop - start for start, stop in rows]
        assert max(sizes) - min(sizes) <= 1
        even_share = ceil(sum(map(prod, shapes.values())) / num_fragments)
        assert max(sizes) == 1 or max(sizes) * prod(shapes[name][1:]) <= min(max_slice_numel, even_share)
    numels = [plan.numel(p) for p in range(plan.num_fragments)]
    slices = [prod(plan.slice_shape(s)) for fragment in plan.fragments for s in fragment]
    assert sum(numels) == sum(map(prod, shapes.values()))
    assert min(numels) > 0
    assert plan.num_fragments == min(num_fragments, len(slices))
    assert max(numels) <= sum(numels) / plan.num_fragments + max(slices)


@pytest.mark.seconds
@settings(derandomize=True, deadline=None)
@given(_models, st.randoms(use_true_random=False))
def test_plan_is_the_same_for_any_order_of_parameters(shapes: Shapes, random: Random) -> None:
    items = list(shapes.items())
    random.shuffle(items)
    one, other = (FragmentPlan.balanced(model, num_fragments=4, max_slice_numel=50) for model in (shapes, dict(items)))
    assert one == other
    assert one.digest == other.digest


def test_digest_depends_on_shapes_cut_and_merge_kind() -> None:
    def digest(rows: int = 8, num_fragments: int = 2, mean_names: tuple[str, ...] = ()) -> str:
        shapes = {"a": (rows, 4), "b": (3,)}
        plan = FragmentPlan.balanced(shapes, num_fragments=num_fragments, max_slice_numel=100, mean_names=mean_names)
        return plan.digest

    assert digest() == digest()
    assert len({digest(), digest(rows=9), digest(num_fragments=3), digest(mean_names=("a",))}) == 4
    assert len(digest()) == 64


def decoder_shapes(config: object) -> Shapes:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def gemma_12b() -> Shapes:
    from transformers import Gemma3TextConfig

    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}
    sizes = {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48}
    return decoder_shapes(Gemma3TextConfig(vocab_size=262208, **sizes, **heads))


def mistral_12b() -> Shapes:
    from transformers import MistralConfig

    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40}
    return decoder_shapes(MistralConfig(vocab_size=131072, **sizes, **heads))


def tiny_gpt() -> Shapes:
    block = {"qkv": (384, 128), "out": (128, 128), "up": (512, 128), "down": (128, 512), "ln1": (128,), "ln2": (128,)}
    layers = {f"h.{k}.{name}": shape for k in range(4) for name, shape in block.items()}
    return {"wte": (256, 128), "wpe": (128, 128), "ln": (128,), **layers}


def seen_by_a_compiler(plan: FragmentPlan, fragment: tuple[Slice, ...]) -> tuple[object, ...]:
    """Return the shapes of slices and of their parameters, and which slices share a parameter."""
    numbers: dict[str, int] = {}
    return tuple((plan.slice_shape(s), plan.shapes[s.name], numbers.setdefault(s.name, len(numbers))) for s in fragment)


@pytest.mark.parametrize(
    ("model", "num_parameters", "num_tensors", "num_signatures", "num_graphs", "peak_to_mean"),
    [
        pytest.param(gemma_12b, 11_766_034_176, 626, 3, 3, 1.011, id="gemma"),
        pytest.param(mistral_12b, 12_247_782_400, 363, 4, 4, 1.009, id="mistral"),
        pytest.param(tiny_gpt, 836_736, 27, 4, 6, 1.06, id="tiny"),
    ],
)
def test_real_models_are_balanced_with_few_signatures(
    model: Callable[[], Shapes],
    *,
    num_parameters: int,
    num_tensors: int,
    num_signatures: int,
    num_graphs: int,
    peak_to_mean: float,
) -> None:
    shapes = model()
    plan = FragmentPlan.balanced(shapes, num_fragments=24, max_slice_numel=2**24)
    numels = [plan.numel(p) for p in range(24)]
    assert (sum(numels), len(shapes)) == (num_parameters, num_tensors)
    assert len(plan.signatures()) == num_signatures
    assert len({seen_by_a_compiler(plan, fragment) for fragment in plan.fragments}) == num_graphs
    assert max(numels) <= peak_to_mean * sum(numels) / 24


def test_model_with_fewer_rows_than_fragments_gets_fewer_fragments() -> None:
    plan = FragmentPlan.balanced({"a": (2, 5), "scalar": ()}, num_fragments=24, max_slice_numel=100)
    assert sorted(s for fragment in plan.fragments for s in fragment) == [
        Slice("a", 0, 1),
        Slice("a", 1, 2),
        Slice("scalar", 0, 1),
    ]
    assert plan.num_fragments == 3


def test_all_problems_of_a_plan_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        FragmentPlan.balanced({"a": (0, 3)}, num_fragments=0, max_slice_numel=0, mean_names=["b"])
    assert len(caught.value.problems) == 4
    assert "'a' has shape (0, 3)" in caught.value.problems[0]
    with pytest.raises(ConfigError, match="no parameters"):
        FragmentPlan.balanced({}, num_fragments=1, max_slice_numel=1)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(_models, st.sampled_from([16, 32]))
def test_gather_then_scatter_restores_the_model_and_pads_with_zeros(shapes: Shapes, block_size: int) -> None:
    plan = FragmentPlan.balanced(shapes, num_fragments=3, max_slice_numel=40)
    tensors = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    restored = {name: torch.nn.Parameter(torch.full(shape, torch.nan)) for name, shape in shapes.items()}
    for p in range(plan.num_fragments):
        layout = plan.layout(p, block_size)
        flat = gather(layout, tensors, torch.full((layout.padded_numel,), torch.nan))
        assert not flat.requires_grad
        assert all(entry.offset % block_size == 0 for entry in layout.entries)
        assert layout.padded_numel % block_size == 0
        assert layout.numel == plan.numel(p)
        scatter(layout, flat, restored)
        for entry in layout.entries:
            entry.of(flat).zero_()
        assert torch.equal(flat, torch.zeros_like(flat))
    assert all(torch.equal(tensors[name], restored[name]) for name in shapes)


def test_gather_and_scatter_cast_and_take_tensors_that_are_not_contiguous() -> None:
    plan = FragmentPlan.balanced({"w": (6, 5)}, num_fragments=1, max_slice_numel=10)
    layout = plan.layout(0, 16)
    weight = torch.randn(5, 6).t()
    flat = gather(layout, {"w": weight}, torch.empty(layout.padded_numel, dtype=torch.bfloat16))
    target = torch.zeros(5, 6).t()
    scatter(layout, flat, {"w": target})
    assert torch.equal(target, weight.bfloat16().float())


def test_layout_merges_embeddings_by_mean_and_the_rest_by_rda() -> None:
    plan = FragmentPlan.balanced(
        {"embed": (8, 4), "w": (4, 4)}, num_fragments=1, max_slice_numel=99, mean_names={"embed"}
    )
    assert {entry.slice.name: entry.merge for entry in plan.layout(0, 16).entries} == {"embed": "mean", "w": "rda"}
