"""The compiled loops give the same bits as torch, with any number of threads."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lightning_diloco.core import native, outer_lr
from lightning_diloco.core.fragments import FragmentPlan, gather
from lightning_diloco.core.merge import merge_fragment
from lightning_diloco.core.outer import Momentum, OuterState, outer_step
from lightning_diloco.core.outer_lr import momentum_dots
from lightning_diloco.core.quantize import Decoder, encode
from lightning_diloco.errors import NonFiniteError

COEFS = Momentum(decay=0.6, push=0.37)


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def hard(numel: int, seed: int = 0) -> Tensor:
    """Return values of every magnitude: blocks of zeros, subnormal values, rounding ties and the largest floats."""
    x = normal(numel, seed) * 10.0 ** torch.randint(-44, 36, (numel,), generator=torch.Generator().manual_seed(seed))
    x[::7] = 0.0
    x[5::1001] = -0.0
    x[numel // 2 : numel // 2 + 600] = torch.arange(600) - 300.5
    x[numel // 3 : numel // 3 + 600] = 0.0
    x[numel // 4 : numel // 4 + 600] = 1e-42
    x[-1] = torch.finfo(torch.float32).max
    return x


@pytest.fixture(params=[1, 3])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make several threads process every vector with the compiled loops, in small units."""
    before = torch.get_num_threads()
    monkeypatch.setattr(native, "SMALLEST_NUMEL", 0)
    monkeypatch.setattr(native, "UNIT_NUMEL", 4096)
    assert native.load() is None
    torch.set_num_threads(request.param)
    uses = []
    choose = native.kernels_for

    def kernels_for(x: Tensor, bits: int | None) -> object:
        uses.append((found := choose(x, bits)) is not None)
        return found

    monkeypatch.setattr(native, "kernels_for", kernels_for)
    yield
    torch.set_num_threads(before)
    assert any(uses), "no compiled loop was used"


def by_torch(call: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(native, "SMALLEST_NUMEL", sys.maxsize)
        return call()


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("values", [normal, hard])
@pytest.mark.parametrize(("numel", "block_size"), [(40_000, 16), (40_001, 256), (3, 64), (65_536, 4096)])
def test_encoding_and_decoding(
    values: Callable[[int], Tensor], numel: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = values(numel) if numel > 3 else normal(numel)

    def encoded() -> Tensor:
        return encode(x, wire="int8", block_size=block_size, name="x")

    buffer = encoded()
    assert same(buffer, by_torch(encoded, monkeypatch))
    decoder = Decoder(buffer, numel, "int8", block_size)
    for call in (lambda: decoder.read(0, torch.empty(numel)), lambda: decoder.add_to(normal(numel, 1), sign=-1)):
        assert same(call(), by_torch(call, monkeypatch))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("merge", ["rda", "mean"])
@pytest.mark.parametrize("num", [1, 2, 5])
@pytest.mark.parametrize("values", [normal, hard])
def test_merging(values: Callable[..., Tensor], num: int, merge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FragmentPlan.balanced(
        {"w": (170, 333), "bias": (33,), "scalar": ()}, num_fragments=1, max_slice_numel=1 << 20
    )
    layout = plan.layout(0, 64)
    buffers = []
    for m in range(num):
        tensors = {"w": values(170 * 333, m).view(170, 333), "bias": normal(33, m), "scalar": normal(1, m)[0]}
        flat = gather(layout, tensors, torch.empty(layout.padded_numel))
        buffers.append(encode(flat, wire="int8", block_size=64, name="flat"))

    def merged() -> Tensor:
        found, report = merge_fragment(
            layout, buffers, [0.9 / num] * num, wire="int8", block_size=64, merge=merge, max_norms=limits
        )
        reports.append(report)
        return found

    for scale in (2.0, 0.5):  # the first contribution is longer than the second limit
        reports: list[object] = []
        first = merge_fragment(layout, buffers[:1], [1.0], wire="int8", block_size=64, merge="mean")[1].norms[0]
        limits = [scale * first] + [float("inf")] * (num - 1)
        assert same(merged(), by_torch(merged, monkeypatch))
        assert reports[0] == reports[1]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("values", [normal, hard])
@pytest.mark.parametrize(("block_size", "every"), [(16, 1), (256, 1), (16, 3)])
def test_momentum_dots(
    values: Callable[..., Tensor], block_size: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer_lr, "MEASURED_NUMEL", 160 * 256 // every)
    gradient, momentum = values(160 * 256).bfloat16(), values(160 * 256, 1)

    def dots() -> Tensor:
        return torch.tensor(momentum_dots(gradient, momentum, block_size=block_size), dtype=torch.float64)

    assert same(dots(), by_torch(dots, monkeypatch))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("block_size", [16, 256])
def test_outer_step(in_place: bool, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 160 * 256
    start = [hard(numel), normal(numel, 1), hard(numel) + 1e-3 * normal(numel, 2)]
    gradient = normal(numel, 3).bfloat16()

    def stepped() -> Tensor:
        state = OuterState(*(x.clone() for x in start))
        about = {"lr": 0.6, "momentum_coef": COEFS, "wire": "int8", "block_size": block_size, "in_place": in_place}
        after, update = outer_step(state, gradient, **about)
        assert all((new is old) == in_place for new, old in zip(after.tensors, state.tensors, strict=True))
        assert in_place or all(same(old, x) for old, x in zip(state.tensors, start, strict=True))
        return torch.cat([x.view(torch.uint8) for x in (*after.tensors, update)])

    assert same(stepped(), by_torch(stepped, monkeypatch))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("bad", ["momentum", "master"])
def test_outer_step_that_is_not_finite_is_refused(bad: str) -> None:
    state = OuterState(torch.zeros(1024), torch.zeros(1024), torch.zeros(1024))
    getattr(state, bad)[700] = torch.inf
    with pytest.raises(NonFiniteError, match="momentum or the update"):
        outer_step(state, torch.zeros(1024).bfloat16(), lr=0.6, momentum_coef=COEFS, wire="int8", block_size=256)


def test_other_wires_and_short_vectors_are_left_to_torch() -> None:
    assert native.load() is None
    long, short = (torch.empty(numel, dtype=torch.uint8) for numel in (native.SMALLEST_NUMEL, 1000))
    assert native.kernels_for(long, 8) is not None
    assert native.kernels_for(short, 8) is None
    assert native.kernels_for(long, 4) is None
    assert native.kernels_for(long[::2], 8) is None


def test_machine_without_numba_warns_once_and_uses_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "lightning_diloco.core.kernels", raising=False)
    monkeypatch.delattr("lightning_diloco.core.kernels", raising=False)
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setattr(native, "_thread", None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            native.warm_up(native.SMALLEST_NUMEL)
        (thread,) = [each for each in threading.enumerate() if each.name == "compile-kernels"] or [native._thread]
        thread.join(60)
    (line,) = caplog.messages
    assert "numba" in line
    assert "pip install" in line
    assert native.kernels_for(torch.empty(native.SMALLEST_NUMEL, dtype=torch.uint8), 8) is None


def test_short_fragments_do_not_load_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_thread", None)
    native.warm_up(native.SMALLEST_NUMEL - 1)
    assert native._thread is None
