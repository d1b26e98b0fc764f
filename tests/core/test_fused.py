"""The kernels for GPUs give the same bits as torch: in Triton's interpreter, and on a GPU if there is one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_diloco.core import fused
from lightning_diloco.core.quantize import Decoder, encode, encode_unchecked
from lightning_diloco.errors import NonFiniteError
from tests.core.test_native import hard, normal, same


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device whose vectors are processed by the kernels; on the CPU, by Triton's interpreter."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("on a GPU, Triton compiles")
    monkeypatch.setattr(fused, "DEVICES", {request.param})
    assert fused.kernels_for(torch.zeros(1, device=request.param), 8, 16) is not None
    return str(request.param)


def by_torch(call: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(fused, "DEVICES", ())
        return call()


@pytest.mark.seconds
@pytest.mark.parametrize("values", [normal, hard])
@pytest.mark.parametrize(("numel", "block_size"), [(4_096, 16), (40_001, 256), (3, 64), (12_289, 4096)])
def test_encoding_and_adding(
    values: Callable[[int], Tensor], numel: int, block_size: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = values(numel) if numel > 3 else normal(numel)
    expected = by_torch(lambda: encode(x, wire="int8", block_size=block_size, name="x"), monkeypatch)

    def encoded() -> Tensor:
        return encode(x.to(where), wire="int8", block_size=block_size, name="x").cpu()

    assert same(encoded(), expected)
    assert same(by_torch(encoded, monkeypatch), expected)
    for sign in (1, -1):

        def added(at: str = where, sign: int = sign) -> Tensor:
            decoder = Decoder(expected.to(at), numel, "int8", block_size)
            return decoder.add_to(normal(numel, 1).to(at), sign=sign).cpu()

        assert same(added(), by_torch(lambda: added("cpu"), monkeypatch))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter divides by numpy
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_refused(bad: float, where: str) -> None:
    x = normal(1000).to(where)
    x[700] = bad
    with pytest.raises(NonFiniteError, match="x"):
        encode(x, wire="int8", block_size=64, name="x")
    buffer = encode_unchecked(x, wire="int8", block_size=64)
    assert int(buffer[1000:].clone().view(torch.bfloat16).isfinite().sum()) == 15  # of 16 blocks


def test_other_vectors_are_left_to_torch(where: str) -> None:
    x = torch.zeros(64, device=where)
    assert fused.kernels_for(x, 8, 16) is not None
    for other, bits, size in ((x, 4, 16), (x, None, 16), (x, 8, 24), (x[::2], 8, 16), (x.bfloat16(), 8, 16)):
        assert fused.kernels_for(other, bits, size) is None


def test_machine_without_triton_warns_once_and_uses_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "lightning_diloco.core.fused_kernels"
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(name, raising=False)
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    fused._loaded.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(encode(torch.ones(16), wire="int8", block_size=16, name="x")) == 18
    fused._loaded.cache_clear()
    (record,) = caplog.records
    assert "triton cannot be used on cpu (ModuleNotFoundError" in record.message
