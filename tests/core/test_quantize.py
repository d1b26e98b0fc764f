"""The wire codec: error bounds, exactness, refusals."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_diloco.config import Wire
from lightning_diloco.core.fragments import FragmentPlan, gather
from lightning_diloco.core.quantize import (
    Decoder,
    decode,
    encode,
    encode_fragment,
    integers_nbytes,
    wire_nbytes,
)
from lightning_diloco.errors import CorruptMessageError, NonFiniteError

WIRES = get_args(Wire)
wires = pytest.mark.parametrize("wire", WIRES)


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def coded(x: Tensor, bits: int = 8, block_size: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers (two of 4 bits in a byte), scales, and the decoded values."""
    wire: Wire = "int8" if bits == 8 else "int4"
    buffer = encode(x, wire=wire, block_size=block_size, name="x")
    at = integers_nbytes(x.numel(), wire, block_size)
    back = decode(buffer, numel=x.numel(), wire=wire, block_size=block_size)
    return buffer[:at].view(torch.int8), buffer[at:].clone().view(torch.bfloat16), back


def reference(x: Tensor, bits: int, block_size: int) -> Tensor:
    """Return the result of the formula, block by block, in float64."""
    out = []
    for block in x.double().split(block_size):
        exact = block.abs().max() / (2 ** (bits - 1) - 1)
        scale = exact.float().bfloat16()
        if scale.double() < exact.float().double():
            scale = torch.nextafter(scale, torch.tensor(torch.inf, dtype=torch.bfloat16))
        out.append(block if scale == 0 else (block / scale.double()).round() * scale.double())
    return torch.cat(out)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.integers(1, 700),
    st.sampled_from([4, 8]),
    st.sampled_from([16, 64, 256]),
    st.integers(0, 99),
    st.integers(-30, 30),
)
def test_quantize_equals_the_formula_for_any_length(
    numel: int, bits: int, block_size: int, seed: int, exponent: int
) -> None:
    x = normal(numel, seed) * 10.0**exponent
    q, scales, back = coded(x, bits, block_size)
    assert torch.equal(back.double(), reference(x, bits, block_size))
    assert q.nbytes + scales.nbytes == wire_nbytes(numel, "int8" if bits == 8 else "int4", block_size)


@pytest.mark.parametrize(("bits", "percent"), [(8, 0.70), (4, 13.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relative_error_of_gaussian_values_over_several_chunks(bits: int, percent: float, dtype: torch.dtype) -> None:
    x = normal((1 << 18) * 2 + 1234).to(dtype)
    _, _, back = coded(x, bits)
    assert (back - x.float()).norm() / x.float().norm() == pytest.approx(percent / 100, rel=0.05)


def test_rounding_is_to_nearest_even() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    assert coded(x)[0][:8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_scale_is_rounded_up_so_that_nothing_clips() -> None:
    x = torch.linspace(1.0, 2.0, 997).repeat_interleave(16) * 127
    q, scales, _ = coded(x, block_size=16)
    assert (scales.float() >= x[::16] / 127).all()
    assert (scales.float() <= x[::16] / 127 * (1 + 2**-7)).all()
    assert q.max() <= 127


@pytest.mark.parametrize("tiny", [0.0, 1e-40, 1e-37])
def test_block_of_zeros_or_subnormal_scale_becomes_zero(tiny: float) -> None:
    _, scales, back = coded(torch.full((256,), tiny))
    assert not scales.any()
    assert not back.any()


@wires
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 777, (1 << 18) + 3])
def test_decode_inverts_encode_at_the_stated_length(wire: Wire, numel: int) -> None:
    x = normal(numel)
    buffer = encode(x, wire=wire, block_size=256, name="x")
    assert (buffer.dtype, buffer.numel()) == (torch.uint8, wire_nbytes(numel, wire, 256))
    back = decode(buffer, numel=numel, wire=wire, block_size=256)
    step = {"int8": 1 / 127, "int4": 1 / 7, "bf16": 2**-7, "fp32": 0.0}[wire]
    assert ((back - x).abs() <= 0.51 * step * 6).all()
    assert wire != "fp32" or torch.equal(back, x)


@wires
def test_encode_does_not_share_memory_with_its_input(wire: Wire) -> None:
    x = normal(512)
    buffer = encode(x, wire=wire, block_size=256, name="x")
    before = buffer.clone()
    x.zero_()
    assert torch.equal(buffer, before)


@wires
def test_decoder_reads_parts_as_the_whole(wire: Wire) -> None:
    buffer = encode(normal(1000), wire=wire, block_size=64, name="x")
    whole = decode(buffer, numel=1000, wire=wire, block_size=64)
    decoder = Decoder(buffer, 1000, wire, 64)
    assert torch.equal(torch.cat([decoder.read(0, torch.empty(640)), decoder.read(640, torch.empty(360))]), whole)


@wires
def test_decode_takes_a_buffer_at_an_odd_offset(wire: Wire) -> None:
    buffer = encode(normal(301), wire=wire, block_size=64, name="x")
    shifted = torch.cat([buffer.new_zeros(1), buffer])[1:]
    options = {"numel": 301, "wire": wire, "block_size": 64}
    assert torch.equal(decode(shifted, **options), decode(buffer, **options))


@wires
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused_by_name(wire: Wire, bad: float) -> None:
    plan = FragmentPlan.balanced({"good": (3, 40), "bad": (2, 50)}, num_fragments=1, max_slice_numel=50)
    layout = plan.layout(0, 16)
    tensors = {"good": torch.ones(3, 40), "bad": torch.ones(2, 50)}
    tensors["bad"][1, 7] = bad
    flat = gather(layout, tensors, torch.empty(layout.padded_numel))
    with pytest.raises(NonFiniteError, match=r"Inf in bad\[1:2\]: only finite"):
        encode_fragment(layout, flat, wire, 16)
    with pytest.raises(NonFiniteError, match="Inf in the fragment: only finite"):
        encode(flat, wire=wire, block_size=16, name="the fragment")


@wires
def test_wrong_length_is_corrupt_and_names_both_lengths(wire: Wire) -> None:
    buffer = encode(normal(300), wire=wire, block_size=64, name="x")
    with pytest.raises(CorruptMessageError, match=f"{buffer.numel() - 1} bytes.* take {buffer.numel()}"):
        decode(buffer[:-1], numel=300, wire=wire, block_size=64)


@wires
def test_values_or_scales_that_are_not_finite_are_corrupt(wire: Wire) -> None:
    buffer = encode(normal(256), wire=wire, block_size=64, name="x")
    buffer[-2:] = torch.tensor([0xC0, 0x7F], dtype=torch.uint8)  # a bfloat16 or the upper half of a float32: NaN
    with pytest.raises(CorruptMessageError, match="NaN"):
        decode(buffer, numel=256, wire=wire, block_size=64)


def test_negative_scale_is_corrupt() -> None:
    buffer = encode(normal(256), wire="int8", block_size=256, name="x")
    buffer[-1] |= 0x80
    with pytest.raises(CorruptMessageError, match="negative scales"):
        decode(buffer, numel=256, wire="int8", block_size=256)
